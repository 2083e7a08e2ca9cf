"""Factored per-sample gradients against explicit ones: norms, clipped sums, and the exactness that both need."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lsg.kernels import exact
from lsg.parameters import outer
from lsg.parameters.outer import OuterProducts
from lsg.step.clipping import Clipper

B, T, M, N = 6, 5, 7, 11
C = 0.5


def pair(dtype: torch.dtype = torch.float64, tokens: int = T) -> OuterProducts:
    generator = torch.Generator().manual_seed(0)
    rows, columns = (torch.randn(B, tokens, n, generator=generator, dtype=torch.float64) for n in (M, N))
    return OuterProducts(rows.to(dtype), columns.to(dtype))


def explicit(products: OuterProducts) -> Tensor:
    """What it stands for, in float64: (B, entries)."""
    full = torch.einsum("btm,btn->bmn", products.rows.double(), products.columns.double()).flatten(1)
    return products.scale * (full if products.kept is None else full[:, products.kept])


VARIANTS = {
    "all": {},
    "kept": {"kept": torch.tensor([0, 3, 12, 40, 76])},
    "scaled": {"scale": 0.1},
    "both": {"kept": torch.tensor([5, 6, 70]), "scale": 3.0},
}


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_norms_and_sums_are_those_of_the_products(variant: str, dtype: torch.dtype, tokens: int) -> None:
    made = pair(dtype, tokens)
    products = OuterProducts(made.rows, made.columns, **VARIANTS[variant])  # type: ignore[arg-type]
    wanted = explicit(products)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    assert products.shape == tuple(wanted.shape) and products.dtype == torch.promote_types(dtype, torch.float32)
    norms = products.row_norms()
    assert norms.dtype == torch.float64
    torch.testing.assert_close(norms, wanted.norm(dim=1), rtol=tolerance, atol=0)
    factors = torch.linspace(0.2, 2.0, B).to(products.dtype)
    total = products.weighted_sum(factors)
    assert total.dtype == products.dtype
    error = (total.double() - factors.double() @ wanted).norm() / wanted.norm()
    assert float(error) < tolerance
    torch.testing.assert_close(products[2:4].row_norms(), norms[2:4])
    torch.testing.assert_close(
        products.materialize().double(), explicit(made).view(B, M, N), rtol=tolerance, atol=tolerance
    )


def test_norms_are_formed_a_few_samples_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, seen = pair().row_norms(), []
    products = exact.products

    def watched(rows: Tensor, columns: Tensor) -> Tensor:
        seen.append(len(rows))
        return products(rows, columns)

    monkeypatch.setattr(exact, "products", watched)
    monkeypatch.setattr(outer, "_CHUNK", 2 * M * N)
    torch.testing.assert_close(pair().row_norms(), wanted)
    assert seen == [2, 2, 2]


def test_a_norm_is_not_that_of_the_shortcut_which_cancels() -> None:
    """x x^T times g g^T, summed up, is a small difference of large numbers in float32. (Samples that cancel more than
    these are taken for larger ones.)"""
    shortcuts = []
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        x, g = (torch.randn(1, 1, n, generator=generator).bfloat16() for n in (N, M))
        rows, columns = torch.cat([g, -g], dim=1).float(), torch.cat([x, x * (1 + 2**-4)], dim=1).float()
        products = OuterProducts(rows, columns)
        wanted = float(explicit(products).norm())
        assert float(products.row_norms()) == pytest.approx(wanted, rel=3e-7)
        gram = (rows @ rows.mT) * (columns @ columns.mT)
        shortcuts.append(abs(math.sqrt(max(float(gram.sum()), 0.0)) / wanted - 1))
    assert max(shortcuts) > 3e-6


@pytest.mark.parametrize("size", [1.0, 1e3, 1e6])
def test_a_sample_that_cancels_moves_the_sum_by_no_more_than_the_bound(size: float) -> None:
    """Two tokens with opposite gradients, of any size: nothing is left of them but the rounding of what they met."""
    calm = pair(torch.float32, 2)
    generator = torch.Generator().manual_seed(5)
    x, g = size * torch.randn(1, 1, N, generator=generator), size * torch.randn(1, 1, M, generator=generator)
    cancels = torch.cat([g, -g], dim=1), torch.cat([x, x], dim=1)
    clipper = Clipper("flat", C)
    for place in range(B + 1):
        rows, columns = (
            torch.cat([old[:place], new, old[place:]])
            for old, new in zip((calm.rows, calm.columns), cancels, strict=True)
        )
        whole = clipper.clip([[OuterProducts(rows, columns)]], 1.0).vector.double()
        without = clipper.clip([[calm]], 1.0).vector.double()
        assert float((whole - without).norm()) <= C * 1e-3


def test_a_large_token_without_gradient_makes_no_sample_smaller() -> None:
    """What cannot cancel is not taken for cancelled: an attention sink, or another call of the same weight."""
    products = pair(torch.float32)
    rows, columns = (torch.cat([t, torch.zeros_like(t[:, :1])], dim=1) for t in (products.rows, products.columns))
    columns[:, -1] = 1e6
    torch.testing.assert_close(OuterProducts(rows, columns).row_norms(), products.row_norms())


@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic"])
@pytest.mark.parametrize("side", ["rows", "columns"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38, 1e30])
def test_a_broken_sample_counts_as_zero(value: float, side: str, clipping: str) -> None:
    """A huge one counts for at most C, or as zero where it overflows."""
    products, other = pair(torch.float32), torch.randn(B, 4)
    getattr(products, side)[2, 1, 3] = value
    clipper = Clipper(clipping, C)  # type: ignore[arg-type]
    found = clipper.clip([[products], [other]], 1.0).vector
    rest = [0, 1, 3, 4, 5]
    without = [[OuterProducts(products.rows[rest], products.columns[rest])], [other[rest]]]
    change = (found - clipper.clip(without, 1.0).vector).double().norm()
    assert float(change) <= (C * (1 + 1e-6) if math.isfinite(value) else 1e-6)
    if not math.isfinite(value):
        assert not products.row_norms()[2].isfinite() and products.row_norms().isfinite().sum() == B - 1


def test_a_sample_that_another_slot_breaks_is_left_out_here() -> None:
    products, other = pair(torch.float32), torch.randn(B, 4)
    other[1] = math.nan
    rest = [0, 2, 3, 4, 5]
    clipper = Clipper("per_layer", C)
    found = clipper.clip([[products], [other]], 1.0).vector
    without = [[OuterProducts(products.rows[rest], products.columns[rest])], [other[rest]]]
    torch.testing.assert_close(found, clipper.clip(without, 1.0).vector)


@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic"])
def test_sums_have_the_order_of_the_slots_whatever_is_clipped_together(
    clipping: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(2)
    small = [torch.randn(B, n, generator=generator, dtype=torch.float64) for n in (3, 1, 2)]
    factors = [pair(), OuterProducts(pair().rows, pair().columns, torch.tensor([1, 4]), 0.5)]
    large = torch.randn(B, 40, generator=generator, dtype=torch.float64)
    mixed: list[list[Any]] = [[small[0]], [factors[0]], [small[1], small[2]], [large], [factors[1]]]
    plain = [[explicit(p) if isinstance(p, OuterProducts) else p for p in parts] for parts in mixed]
    thresholds = (0.3, 0.5, 0.2, 0.4, 0.1) if clipping == "per_layer" else C
    clipper = Clipper(clipping, thresholds)  # type: ignore[arg-type]
    wanted = clipper.clip([[torch.cat(parts, dim=1)] for parts in plain], 4.0).vector
    for joined in (2**26, 1, 20):
        monkeypatch.setattr("lsg.step.clip_groups._SMALL", 100)
        monkeypatch.setattr("lsg.step.clip_groups._JOINED", joined)
        for parts in (mixed, plain):
            torch.testing.assert_close(clipper.clip(parts, 4.0).vector, wanted)


@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e5])
def test_a_samples_share_is_at_most_the_bound(size: float, dtype: torch.dtype, clipping: str) -> None:
    made = pair(dtype)
    products = OuterProducts(made.rows * size, made.columns * size)
    clipper = Clipper(clipping, C)  # type: ignore[arg-type]
    for i in range(B):
        share = clipper.clip([[products[i : i + 1]], [torch.full((1, 3), size)]], 8.0).vector
        assert float(share.double().norm()) <= C * (1 + 1e-6)


def test_three_parts_hold_a_float32_number_exactly() -> None:
    generator = torch.Generator().manual_seed(3)
    exponents = torch.randint(-100, 100, (40, 50), generator=generator)
    values = torch.randn(40, 50, generator=generator) * torch.exp2(exponents.float())
    values[0, :4] = torch.tensor([0.0, 1.0, 1 + 2**-23, -(2 - 2**-23)])  # the longest there are
    parts = exact.split(values)
    assert parts.dtype == torch.bfloat16 and parts.shape == (40, 3, 50)
    assert torch.equal(parts.double().sum(1), values.double())


@pytest.mark.parametrize("shape", [(M, N), (N, M), (M, M)])
def test_the_product_of_parts_is_as_exact_as_one_in_float32(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs on tensor cores, with their product replaced by one that does the same: bfloat16 in, float32 out."""
    calls = []

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        assert a.dtype == b.dtype == torch.bfloat16
        calls.append(1)
        return (a.double() @ b.double()).float()

    generator = torch.Generator().manual_seed(4)
    rows, columns = (torch.randn(B, T, n, generator=generator).bfloat16() for n in shape)
    weights = torch.rand(B, generator=generator)
    wanted = torch.einsum("b,btm,btn->mn", weights.double(), rows.double(), columns.double())
    rounded = torch.einsum("btm,btn->mn", (rows * weights.view(-1, 1, 1)).bfloat16().double(), columns.double())
    monkeypatch.setattr(exact, "_splits", lambda values: True)
    monkeypatch.setattr(exact, "_multiply", multiply)
    found = exact.weighted_sum(rows, columns, weights)
    assert calls == [1]
    assert float((found.double() - wanted).abs().max() / wanted.abs().max()) < 2e-7
    assert float((rounded - wanted).abs().max() / wanted.abs().max()) > 1e-4  # what one part alone would give


def state() -> tuple[Any, ...]:
    backends: Any = torch.backends
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:  # the two ways to set it were mixed
        older = "mixed"
    return older, backends.fp32_precision, backends.cuda.matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision


def reset() -> None:
    backends: Any = torch.backends
    torch.set_float32_matmul_precision("highest")
    backends.fp32_precision = backends.cuda.matmul.fp32_precision = backends.mkldnn.matmul.fp32_precision = "none"


def set_older() -> None:
    torch.set_float32_matmul_precision("medium")


def set_newer() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # type: ignore[attr-defined]


def set_for_all() -> None:
    torch.backends.fp32_precision = "tf32"  # type: ignore[attr-defined]


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="PyTorch before 2.9")
@pytest.mark.parametrize("setting", [lambda: None, set_older, set_newer, set_for_all])
def test_products_are_in_float32_and_the_settings_are_put_back(setting: Any) -> None:
    backends: Any = torch.backends
    reset()
    untouched = state()
    seen = []

    class Watched(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "matmul" in getattr(function, "__name__", ""):
                seen.append(state())
            return function(*args, **(kwargs or {}))

    try:
        setting()
        before = state()
        with Watched(), torch.autocast("cpu", dtype=torch.bfloat16):
            assert exact.products(torch.ones(1, 2, 3), torch.ones(1, 2, 3)).dtype == torch.float32
            exact.weighted_sum(torch.ones(1, 2, 3), torch.ones(1, 2, 3), torch.ones(1))
        assert state() == before
        with pytest.raises(RuntimeError):
            exact.weighted_sum(torch.ones(1, 2, 3), torch.ones(1, 5, 3), torch.ones(1))
        assert state() == before
        assert len(seen) == 2
        for older, _, cuda, cpu in seen:
            assert older == "highest" and {cuda, cpu} <= {"ieee", "none"}
        if setting is set_for_all:  # what is inherited still is
            backends.fp32_precision = "none"
            assert state() == untouched
    finally:
        reset()


def test_factors_pay_where_they_are_smaller_than_their_product() -> None:
    def is_faster(*shape: int, outputs: int) -> bool:
        return outer.is_faster(torch.empty(shape, device="meta"), outputs)

    assert is_faster(8, 16, 768, outputs=768) and is_faster(8, 768, outputs=3072)
    assert not is_faster(8, 512, 768, outputs=768)  # longer than the weight is wide
    assert not is_faster(8, 768, outputs=2)  # clipped together with other small ones


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e30, math.nan, math.inf])
def test_the_norm_of_a_single_token_is_not_formed_by_the_product(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    made = pair(torch.float32, tokens=1)
    made.rows[0] *= value
    wanted = explicit(made).norm(dim=1)
    monkeypatch.setattr(exact, "products", None)
    torch.testing.assert_close(made.row_norms(), wanted, rtol=1e-6, atol=0, equal_nan=True)
