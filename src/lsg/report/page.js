"use strict";
// Draws the charts that the page's data describes, sorts its tables, opens its details. Every text goes in as text.
(() => {
  window.addEventListener("error", (event) => {
    const note = document.getElementById("failed");
    note.hidden = false;
    note.textContent = `The charts could not be drawn (${event.message}); the tables below are complete.`;
  });

  const DASHES = ["", "8 4", "2 3", "10 3 2 3"];
  const MOST_VALUES = 6;

  function element(name, attributes = {}, children = []) {
    const svg = ["svg", "g", "path", "line", "rect", "circle", "text", "title"].includes(name);
    const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...[children].flat());
    return made;
  }

  function drawAtEachWidth(figure, draw) {
    let width = 0;
    const look = () => {
      if (figure.clientWidth !== width) draw();
      width = figure.clientWidth;
    };
    look();
    new ResizeObserver(() => requestAnimationFrame(look)).observe(figure); // drawing at once would resize it in turn
  }

  // --- numbers -------------------------------------------------------------------------------------------------------

  // A printed ε is rounded up: it must not promise more than was kept.
  const FORMATS = {
    whole: (value) => String(value),
    percent: (value) => value.toFixed(2),
    epsilon: (value) => (Math.ceil(value * 100 - 1e-9) / 100).toFixed(2),
    plain: (value) => value.toPrecision(4),
  };

  function withSpread(point, axis) {
    const spread = point.std === null ? "" : ` ± ${FORMATS[axis.format](point.std)}`;
    return FORMATS[axis.format](point.y) + spread;
  }

  function niceTicks(low, high, count, whole) {
    const rough = (high - low) / count;
    const power = 10 ** Math.floor(Math.log10(rough));
    let step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
    if (whole) step = Math.max(1, Math.round(step));
    const first = Math.ceil(low / step - 1e-9);
    const last = Math.floor(high / step + 1e-9);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const ticks = [];
    for (let i = first; i <= last; i++) ticks.push({ at: i * step, text: (i * step).toFixed(digits) });
    return ticks;
  }

  function logTicks(low, high) {
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
      for (const factor of [1, 2, 5]) {
        const at = factor * 10 ** power;
        if (at >= low * 0.999 && at <= high * 1.001) ticks.push({ at, text: String(Number(at.toPrecision(3))) });
      }
    }
    return ticks;
  }

  // An axis: its ticks, and the pixel of a value.
  function makeScale(axis, low, high, from, to, count) {
    if (axis.scale === "log") {
      low /= 1.15;
      high *= 1.15;
      const share = (value) => Math.log(value / low) / Math.log(high / low);
      return { ticks: logTicks(low, high), at: (value) => from + share(value) * (to - from) };
    }
    const room = (high - low) * 0.06 || Math.max(Math.abs(high) * 0.05, 0.5);
    if (axis.scale === "from zero") low = 0;
    else if (axis.format !== "whole" || low === high) low -= room;
    if (axis.format !== "whole" || low === high) high += room;
    if (axis.format === "percent") [low, high] = [Math.max(low, 0), Math.min(high, 100.5)];
    const ticks = niceTicks(low, high, count, axis.format === "whole");
    return { ticks, at: (value) => from + ((value - low) / (high - low)) * (to - from) };
  }

  // --- lines ---------------------------------------------------------------------------------------------------------

  function drawLines(figure, chart) {
    const shown = chart.series.map(() => true);
    const plot = element("svg", { role: "img", tabindex: "0" });
    const values = element("div", { class: "values", role: "status", hidden: "" });
    const legend = element("div", { class: "legend", role: "group", "aria-label": `Series of ${chart.title}` });
    figure.append(plot, values, legend);
    let geometry = null;
    let current = -1;

    function redraw() {
      hide();
      geometry = drawPlot(plot, chart, shown, figure.clientWidth);
    }
    function hide() {
      values.hidden = true;
      current = -1;
      plot.querySelector(".guide")?.remove();
    }
    function show(index, pointerY) {
      if (!geometry || !geometry.stops.length) return;
      current = Math.max(0, Math.min(index, geometry.stops.length - 1));
      const x = geometry.stops[current];
      const pixel = geometry.x.at(x);
      plot.querySelector(".guide")?.remove();
      plot.append(element("line", { class: "guide", x1: pixel, x2: pixel, y1: geometry.top, y2: geometry.bottom }));
      fillValues(values, chart, shown, x, geometry, pointerY);
      values.hidden = false;
      const left = pixel + 12 + values.offsetWidth > figure.clientWidth ? pixel - 12 - values.offsetWidth : pixel + 12;
      values.style.left = `${Math.max(0, left)}px`;
      values.style.top = `${plot.getBoundingClientRect().top - figure.getBoundingClientRect().top + geometry.top}px`;
    }

    plot.addEventListener("pointermove", (event) => {
      if (!geometry) return;
      const box = plot.getBoundingClientRect();
      const distance = geometry.stops.map((x) => Math.abs(geometry.x.at(x) - (event.clientX - box.left)));
      show(distance.indexOf(Math.min(...distance)), event.clientY - box.top);
    });
    plot.addEventListener("pointerleave", hide);
    plot.addEventListener("blur", hide);
    plot.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: current - 1, ArrowRight: current + 1, Home: 0, End: Infinity };
      if (event.key === "Escape") hide();
      if (!(event.key in moves)) return;
      event.preventDefault();
      show(moves[event.key], null);
    });

    const buttons = chart.series.map((series, i) => {
      const dash = series.level ? "4 4" : DASHES[series.dash];
      const line = element("line", { class: "line", x1: 0, x2: 22, y1: 4, y2: 4, "stroke-dasharray": dash });
      const swatch = element("svg", { class: series.colour, viewBox: "0 0 22 8", "aria-hidden": "true" }, line);
      const button = element("button", { type: "button", "aria-pressed": "true" }, [swatch, series.label]);
      button.addEventListener("click", () => set(i, !shown[i]));
      return button;
    });
    function set(which, wanted) {
      chart.series.forEach((_, i) => {
        if (which !== null && which !== i) return;
        shown[i] = wanted;
        buttons[i].setAttribute("aria-pressed", String(wanted));
      });
      redraw();
    }
    if (chart.series.length > 4) {
      for (const [text, wanted] of [["show all", true], ["hide all", false]]) {
        const button = element("button", { type: "button" }, text);
        button.addEventListener("click", () => set(null, wanted));
        legend.append(button);
      }
    }
    legend.append(...buttons);
    drawAtEachWidth(figure, redraw);
  }

  function drawPlot(plot, chart, shown, width) {
    const height = Math.round(Math.max(220, Math.min(340, width * 0.6)));
    plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
    plot.setAttribute("height", height);
    const visible = chart.series.filter((_, i) => shown[i]);
    plot.setAttribute("aria-label", describe(chart, visible));
    plot.replaceChildren();
    const [right, top, bottom] = [width - 12, 10, height - 38];
    const points = visible.flatMap((series) => series.points);
    const placed = visible.filter((series) => !series.level).flatMap((series) => series.points);
    if (!placed.length) {
      plot.append(element("text", { x: width / 2, y: height / 2, "text-anchor": "middle", class: "tick" }, "nothing shown"));
      return null;
    }
    const [xs, ys] = [placed.map((p) => p.x), points.flatMap((p) => [p.y - (p.std ?? 0), p.y + (p.std ?? 0)])];
    const y = makeScale(chart.y, Math.min(...ys), Math.max(...ys), bottom, top, 5);
    const left = 30 + 7 * Math.max(...y.ticks.map((tick) => tick.text.length));
    const x = makeScale(chart.x, Math.min(...xs), Math.max(...xs), left, right, Math.max(2, Math.round(width / 90)));
    drawAxes(plot, chart, x, y, { left, right, top, bottom, height });
    for (const series of visible) plot.append(drawSeries(series, x, y, left, right));
    return { stops: [...new Set(xs)].sort((a, b) => a - b), x, y, top, bottom };
  }

  function drawAxes(plot, chart, x, y, box) {
    for (const { at, text } of y.ticks) {
      plot.append(
        element("line", { class: "grid", x1: box.left, x2: box.right, y1: y.at(at), y2: y.at(at) }),
        element("text", { class: "tick", x: box.left - 6, y: y.at(at) + 4, "text-anchor": "end" }, text),
      );
    }
    for (const { at, text } of x.ticks) {
      plot.append(
        element("line", { class: "grid", x1: x.at(at), x2: x.at(at), y1: box.bottom, y2: box.bottom + 4 }),
        element("text", { class: "tick", x: x.at(at), y: box.bottom + 17, "text-anchor": "middle" }, text),
      );
    }
    const [middle, centre] = [(box.top + box.bottom) / 2, (box.left + box.right) / 2];
    plot.append(
      element("text", { x: centre, y: box.height - 4, "text-anchor": "middle" }, chart.x.label),
      element("text", { x: 12, y: middle, "text-anchor": "middle", transform: `rotate(-90 12 ${middle})` }, chart.y.label),
    );
  }

  function drawSeries(series, x, y, left, right) {
    const group = element("g", { class: series.colour });
    const path = (points) => points.map(([px, py], i) => `${i ? "L" : "M"}${px.toFixed(1)} ${py.toFixed(1)}`).join("");
    if (series.level) {
      const at = y.at(series.points[0].y);
      group.append(element("path", { class: "line", d: path([[left, at], [right, at]]), "stroke-dasharray": "4 4" }));
      return group;
    }
    const spread = series.points.filter((p) => p.std !== null);
    if (series.dots) {
      for (const p of spread) {
        const edges = { y1: y.at(p.y - p.std), y2: y.at(p.y + p.std) };
        group.append(element("line", { class: "bar", x1: x.at(p.x), x2: x.at(p.x), ...edges }));
      }
    } else if (spread.length > 1) {
      const upper = spread.map((p) => [x.at(p.x), y.at(p.y + p.std)]);
      const lower = spread.map((p) => [x.at(p.x), y.at(p.y - p.std)]).reverse();
      group.append(element("path", { class: "spread", d: `${path([...upper, ...lower])}Z` }));
    }
    const line = path(series.points.map((p) => [x.at(p.x), y.at(p.y)]));
    group.append(element("path", { class: "line", d: line, "stroke-dasharray": DASHES[series.dash] }));
    if (series.dots || series.points.length === 1) {
      for (const p of series.points) group.append(element("circle", { class: "dot", cx: x.at(p.x), cy: y.at(p.y), r: 4.5 }));
    }
    return group;
  }

  // The values at x; of many series, those nearest to the pointer.
  function fillValues(values, chart, shown, x, geometry, pointerY) {
    let found = [];
    chart.series.forEach((series, i) => {
      const point = series.level ? series.points[0] : series.points.find((p) => p.x === x);
      if (shown[i] && point) found.push({ series, point });
    });
    const all = found.length;
    const distance = ({ point }) => (pointerY === null ? 0 : Math.abs(geometry.y.at(point.y) - pointerY));
    found = found.sort((a, b) => distance(a) - distance(b)).slice(0, MOST_VALUES);
    found.sort((a, b) => b.point.y - a.point.y);
    const rows = found.map(({ series, point }) =>
      element("div", { class: series.colour }, [
        element("span", { "aria-hidden": "true" }, "■"),
        element("span", {}, series.label),
        element("span", {}, withSpread(point, chart.y)),
      ]),
    );
    const head = element("strong", {}, `${chart.x.label} ${FORMATS[chart.x.format](x)}`);
    values.replaceChildren(head, ...rows, all > found.length ? `and ${all - found.length} more` : "");
  }

  function describe(chart, visible) {
    const ends = visible.map((series) => `${series.label}: ${withSpread(series.points.at(-1), chart.y)} at the end`);
    return `${chart.title}, a line chart of ${visible.length} series. ${ends.slice(0, 20).join("; ")}`;
  }

  // --- heat map ------------------------------------------------------------------------------------------------------

  // Three stops of cividis, made for colour-blind readers: dark blue is low, yellow high.
  const STOPS = [[0, 32, 77], [124, 123, 120], [255, 234, 70]];
  function heatColour(share) {
    const at = Math.min(share * 2, 1.999);
    const [from, to] = [STOPS[Math.floor(at)], STOPS[Math.floor(at) + 1]];
    return from.map((value, i) => Math.round(value + (to[i] - value) * (at % 1)));
  }

  function drawHeat(figure, chart) {
    const plot = element("svg", { role: "img" });
    figure.append(plot);
    const cells = chart.cells.flat().filter((cell) => cell);
    const [low, high] = [Math.min(...cells.map((c) => c.y)), Math.max(...cells.map((c) => c.y))];
    const ends = `from ${low.toFixed(2)} to ${high.toFixed(2)} %`;
    plot.setAttribute("aria-label", `${chart.title}, a heat map ${ends}; its values are in the table below it`);
    const redraw = () => {
      const [left, bottom, rowHeight] = [58, 40, 46];
      const height = chart.rows.length * rowHeight + bottom;
      const cellWidth = (figure.clientWidth - left) / chart.columns.length;
      plot.setAttribute("viewBox", `0 0 ${figure.clientWidth} ${height}`);
      plot.setAttribute("height", height);
      plot.replaceChildren();
      chart.cells.forEach((row, i) => {
        const y = i * rowHeight;
        plot.append(element("text", { class: "tick", x: left - 8, y: y + rowHeight / 2 + 4, "text-anchor": "end" }, chart.rows[i]));
        row.forEach((cell, j) => cell && plot.append(drawCell(cell, left + j * cellWidth, y, cellWidth, rowHeight, (cell.y - low) / (high - low || 1))));
      });
      chart.columns.forEach((name, j) =>
        plot.append(element("text", { class: "tick", x: left + (j + 0.5) * cellWidth, y: height - bottom + 17, "text-anchor": "middle" }, name)),
      );
      const middle = (height - bottom) / 2;
      plot.append(
        element("text", { x: (left + figure.clientWidth) / 2, y: height - 4, "text-anchor": "middle" }, chart.x.label),
        element("text", { x: 12, y: middle, "text-anchor": "middle", transform: `rotate(-90 12 ${middle})` }, chart.y.label),
      );
    };
    drawAtEachWidth(figure, redraw);
  }

  function drawCell(cell, x, y, width, height, share) {
    const [red, green, blue] = heatColour(share);
    const ink = 0.299 * red + 0.587 * green + 0.114 * blue > 125 ? "#000000" : "#ffffff";
    const text = element("text", { x: x + width / 2, y: y + height / 2 + 4, "text-anchor": "middle" }, cell.y.toFixed(1));
    text.style.fill = ink;
    const spread = cell.std === null ? "" : ` ± ${cell.std.toFixed(2)}`;
    const title = element("title", {}, `${cell.label}: ${cell.y.toFixed(2)}${spread} %`);
    const area = { x: x + 1, y: y + 1, width: Math.max(1, width - 2), height: height - 2 };
    return element("g", {}, [title, element("rect", { ...area, fill: `rgb(${red} ${green} ${blue})` }), text]);
  }

  // --- the same values as a table ------------------------------------------------------------------------------------

  function tableOf(chart) {
    if (chart.kind === "heat") {
      const rows = chart.cells.map((row, i) => [
        chart.rows[i],
        ...row.map((cell) => (cell ? withSpread(cell, { format: "percent" }) : "—")),
      ]);
      return [[`${chart.y.label} \\ ${chart.x.label}`, ...chart.columns], rows];
    }
    const placed = chart.series.filter((series) => !series.level);
    const stops = [...new Set(placed.flatMap((s) => s.points.map((p) => p.x)))].sort((a, b) => a - b);
    const rows = stops.map((x) => [
      FORMATS[chart.x.format](x),
      ...chart.series.map((series) => {
        const point = series.level ? series.points[0] : series.points.find((p) => p.x === x);
        return point ? withSpread(point, chart.y) : "—";
      }),
    ]);
    return [[chart.x.label, ...chart.series.map((series) => series.label)], rows];
  }

  function addTable(figure, chart) {
    const details = element("details", {}, element("summary", {}, "Values as a table"));
    details.addEventListener("toggle", () => {
      if (details.children.length > 1) return;
      const [head, rows] = tableOf(chart);
      const columns = element("tr", {}, head.map((text) => element("th", { scope: "col" }, text)));
      const body = rows.map((row) => element("tr", {}, row.map((text) => element("td", { class: "number" }, text))));
      const table = element("table", {}, [element("thead", {}, columns), element("tbody", {}, body)]);
      details.append(element("div", { class: "scroll", tabindex: "0" }, table));
    });
    figure.append(details);
  }

  // --- tables and details --------------------------------------------------------------------------------------------

  function makeSortable(table) {
    const body = table.tBodies[0];
    [...table.tHead.rows[0].cells].forEach((cell, column) => {
      const button = element("button", { type: "button" }, cell.textContent);
      cell.replaceChildren(button);
      button.addEventListener("click", () => {
        const sign = cell.getAttribute("aria-sort") === "ascending" ? -1 : 1;
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        cell.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
        body.append(...[...body.rows].sort((a, b) => compare(a.cells[column], b.cells[column], sign)));
      });
    });
  }

  function compare(a, b, sign) {
    const [x, y] = [a.dataset.sort, b.dataset.sort];
    if (x !== undefined && y !== undefined) return sign * (Number(x) - Number(y));
    if (x !== undefined || y !== undefined) return x === undefined ? 1 : -1; // those without a number come last
    return sign * a.textContent.localeCompare(b.textContent, undefined, { numeric: true });
  }

  function openTarget() {
    const target = document.getElementById(location.hash.slice(1));
    if (target instanceof HTMLDetailsElement) target.open = true;
  }

  const sections = JSON.parse(document.getElementById("data").textContent);
  for (const place of document.querySelectorAll(".charts")) {
    for (const chart of sections[Number(place.dataset.section)]) {
      const figure = element("figure", {}, element("figcaption", {}, chart.title));
      place.append(figure);
      (chart.kind === "heat" ? drawHeat : drawLines)(figure, chart);
      addTable(figure, chart);
    }
  }
  document.querySelectorAll("table.sortable").forEach(makeSortable);
  const openAll = document.getElementById("open-all");
  openAll.hidden = false;
  openAll.addEventListener("click", () => document.querySelectorAll("#details details").forEach((d) => (d.open = true)));
  window.addEventListener("hashchange", openTarget);
  openTarget();
})();
