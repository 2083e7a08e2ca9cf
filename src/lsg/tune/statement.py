"""What a search says about privacy: of a paid one, what goes with the model; of others, what made it free."""

from typing import Any

from lsg.accounting.rounding import epsilon_text
from lsg.train.privacy_statement import ONE_RUN_ALONE
from lsg.train.result import RunResult
from lsg.tune.search import Plan, Search


def paid_statement(search: Search, plan: Plan, winner: RunResult, score: float) -> dict[str, Any]:
    """The winner's privacy.json, with ε of the whole search. It does not tell how many runs there were."""
    # Warnings go by the exact score, and the records that it was computed on are protected here.
    run, mean = {key: value for key, value in winner.privacy.items() if key != "warnings"}, search.runs
    draw = (
        f"Poisson with mean {mean}, given that it is not 0" if search.draw == "poisson" else f"geometric, mean {mean}"
    )
    theorem = "theorem 6" if search.draw == "poisson" else "theorem 2"
    epsilon = epsilon_text(plan.epsilon)
    return run | {
        "statement": (
            f"This model is the best of several that were trained on {run['records']:,} records and scored on "
            f"{plan.scored:,} others. The search as a whole, with all its runs, is ({epsilon}, {search.base.delta:g})-"
            "differentially private for adding or removing one record of either kind: this covers the released "
            f"weights, the settings and the score. The number of runs was drawn at random ({draw}); each run drew one "
            f"of {plan.candidates:,} settings, trained with noise of its own, and was scored by its number of right "
            f"answers with Gaussian noise of deviation {plan.score_noise:.4g}. The total was computed from Rényi "
            f"divergences by {theorem} of Papernot & Steinke, 'Hyperparameter tuning with Rényi differential "
            "privacy' (2022). The numbers of records, and the rest of public_by_assumption, count as known to all."
        ),
        "epsilon": plan.epsilon,
        "delta": search.base.delta,
        "accountant": "rdp",
        "search": {
            "number_of_runs": draw,
            "candidates": plan.candidates,
            "varied": search.varied,
            "bound": f"Papernot & Steinke 2022, {theorem}",
            "epsilon_of_one_run": plan.one_run_epsilon,
            "score_noise": plan.score_noise,
            "score": score,
        },
        "public_by_assumption": [
            *run["public_by_assumption"],
            f"The number of records that were scored on, {plan.scored:,}.",
        ],
        "caveats": [
            "The guarantee covers the search as a whole and the one model that came out of it. Other models, scores "
            "and files of the search, how many runs there were and how long it took must not be released.",
            "The settings to choose from must not have been made from these records. A second search, or training "
            "again with these settings on these records, spends privacy again.",
            *(
                text
                for text in run["caveats"]
                if text != ONE_RUN_ALONE and not text.startswith("The score was computed")
            ),
        ],
    }


def cost(search: Search, plan: Plan) -> str:
    """What the search has cost, in words for the user and for the head of tuned.toml."""
    budget = f"({epsilon_text(search.base.epsilon)}, {search.base.delta:g})"
    if search.is_paid:
        return (
            f"PAID: the whole search is ({epsilon_text(plan.epsilon)}, {search.base.delta:g})-differentially private, "
            "the model in model/ included.\n"
            "Training again with these settings on the same data would spend its epsilon once more."
        )
    if search.held_out is None:
        return (
            "FREE: the search ran on public data, and read of the private data their number alone.\n"
            f"lsg train with these settings spends {budget} and nothing more, if the public data really are public."
        )
    return (
        f"NOT PRIVATE for about {100 * search.held_out:g} % of the data: the settings were chosen on that part, "
        "without a guarantee for its records.\n"
        f"lsg train with these settings leaves that part out (tuning_part) and spends {budget} of all other records."
    )
