"""Metric conventions as data: what stands behind a number called "AUPR" or "FPR95".

Nothing enters; a named, frozen `Convention` leaves, to be handed to `evaluate` and stored beside
every number. The rules are those of NovelCraft (paper tables 2 and 3, and the later code of the
TMLR version), 3DOS, OpenOOD / pytorch-ood and Semantic Anomalies. They disagree on purpose:
the same scores give 3DOS FPR95 .733416, .731172 or .750000 according to the rule.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from schemas.errors import ConfigError


class Convention(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(description="Name under which the numbers are stored")
    positive: Literal["novel", "known"] = Field(
        "novel", description="The class that TPR, PPV, recall and precision speak of"
    )
    inside: Literal["novel", "known"] = Field(
        "known", description="The class that is positive in aupr_in; the other one is in aupr_out"
    )
    score_direction: Literal["higher_is_novel", "higher_is_known"] = Field(
        "higher_is_novel", description="Which way the scores handed in point (house: novelty)"
    )
    pr_area: Literal["trapezoid", "average_precision"] = Field(
        description="Area under precision-recall: trapezoid, or the step-wise sum P_k (R_k - R_k-1)"
    )
    roc_drop_intermediate: bool = Field(
        True, description="Thresholds are looked up on the ROC curve without its collinear points"
    )
    tpr_target: float = Field(0.95, gt=0, le=1, description="True positive rate to be reached")
    ppv_target: float | None = Field(
        None, gt=0, le=1, description="Precision to be reached; none: no operating points reported"
    )
    ppv_rule: Literal["lowest_threshold", "smallest_precision_at_least"] = Field(
        "lowest_threshold",
        description="Which of the points that reach ppv_target: most recall, or least precision",
    )
    fpr_rule: Literal["interpolated", "first_threshold"] | None = Field(
        None, description="FPR at tpr_target: np.interp, or first threshold; none: not reported"
    )
    normal_share: float | None = Field(
        None, gt=0, lt=1, description="Share of all weight that known samples get; none: unweighted"
    )


NOVELCRAFT_2022 = Convention(
    name="novelcraft-2022", pr_area="trapezoid", ppv_target=0.80, normal_share=0.75
)
NOVELCRAFT_TMLR = NOVELCRAFT_2022.model_copy(
    update={
        "name": "novelcraft-tmlr",
        "roc_drop_intermediate": False,
        "ppv_rule": "smallest_precision_at_least",
    }
)
NOVELCRAFT_SYMBOLIC = NOVELCRAFT_2022.model_copy(
    update={"name": "novelcraft-symbolic", "pr_area": "average_precision", "ppv_target": 0.40}
)
NOVELCRAFT_EPISODES = NOVELCRAFT_TMLR.model_copy(
    update={"name": "novelcraft-episodes", "ppv_target": 0.95, "normal_share": 0.15}
)
THREEDOS = Convention(
    name="threedos", positive="known", pr_area="trapezoid", fpr_rule="interpolated"
)
THREEDOS_FIRST_THRESHOLD = THREEDOS.model_copy(
    update={"name": "threedos-first-threshold", "fpr_rule": "first_threshold"}
)
OPENOOD = Convention(name="openood", pr_area="trapezoid", fpr_rule="first_threshold")
SEMANTIC = Convention(name="semantic", pr_area="average_precision")

CONVENTIONS = {
    convention.name: convention
    for convention in (
        NOVELCRAFT_2022,
        NOVELCRAFT_TMLR,
        NOVELCRAFT_SYMBOLIC,
        NOVELCRAFT_EPISODES,
        THREEDOS,
        THREEDOS_FIRST_THRESHOLD,
        OPENOOD,
        SEMANTIC,
    )
}


def find_convention(name: str) -> Convention:
    if name not in CONVENTIONS:
        raise ConfigError(
            f"metric convention {name!r} is unknown; expected one of {', '.join(CONVENTIONS)}"
        )
    return CONVENTIONS[name]
