"""The domains of the SAIL-ON protocol as data: columns, encodings, result types, feedback.

One `Domain` per name; nothing here computes. Facts: CONDDA rules 3 (columns, result files), 6
(feedback). `novelty` is our own domain, for tests made from our tables: it has both flags (this
sample is novel, the world has changed), otherwise follows image_classification, and may name the
sample that an instance is and the view that it is shown in.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from schemas.errors import ConfigError

# What an answer line holds after the instance id, or instead of it.
Answer = Literal["label", "columns", "distance", "accuracy", "points"]
# What stands on a result line after the id.
Values = Literal["detection", "classification", "characterization", "text", "labels"]


@dataclass(frozen=True)
class FeedbackType:
    """One kind of feedback: what is told about which posted results, and what it costs."""

    answer: Answer
    result: str
    """Type of the posted results that the answer is about."""
    columns: tuple[str, ...] = ()
    """Ground-truth columns told, for the answers `label` and `columns`."""
    budget: tuple[str, ...] = ("feedback_max_ids",)
    """Metadata keys, the first present one is the number of ids a round."""
    counted: bool = True
    """As published: whether an answer is cut to the ids that are left."""
    undeclared: bool = False
    """As published: whether it is answered before the agent has declared novelty."""
    wrong_only: bool = False
    """No ids asked: tell only of instances that were answered wrongly."""
    free_when_given: bool = False
    """As published: not cut in sessions with the red-light hint."""
    points: int = 0
    """Points that each answered id costs."""


@dataclass(frozen=True)
class Domain:
    """How the files of one domain read."""

    name: str
    columns: tuple[str, ...]
    """Ground-truth columns by position; trailing ones may be absent from a file."""
    integers: tuple[str, ...]
    """Which of them hold whole numbers."""
    changed: str
    """Column that says whether the world has changed."""
    novel: str
    """Column that says whether this sample is novel: the ground truth of the metrics."""
    label: str
    """Column that holds the class: the index of its column in a posted vector."""
    unknown: Literal["first", "last"]
    """Place of the unknown class in a posted classification vector.

    Where it is first, labels of novel classes are -1, -2, ...; else all of them are K, the number
    of known classes.
    """
    results: Mapping[str, Values]
    """Result types an agent may post."""
    feedback: Mapping[str, FeedbackType]
    served: tuple[str, ...] = ("instance_id",)
    """Ground-truth columns on a line of a served dataset."""
    served_quoted: tuple[str, ...] = ()
    """Which of them stand between quote characters, doubled inside."""
    verbatim: tuple[str, ...] = ()
    """Columns whose blanks and quotes are part of the value."""
    encoding: str = "utf-8"
    quotechar: str = "|"
    unknown_counted: bool = False
    """Whether `known_classes` of the metadata counts the unknown class, too."""
    required: int = 2
    """Columns that every ground-truth file has at least."""

    @property
    def first_label(self) -> int:
        """Label of the first known class: its column, so 1 where the unknown column is first."""
        return int(self.unknown == "first")


_RESULTS: dict[str, Values] = {
    "detection": "detection",
    "classification": "classification",
    "characterization": "characterization",
}
_DETECTION_IDS = ("max_detection_feedback_ids", "feedback_max_ids")
_ACCURACY = FeedbackType(answer="accuracy", result="classification", counted=False)


def _label(column: str, undeclared: bool = False) -> FeedbackType:
    return FeedbackType("label", "classification", (column,), undeclared=undeclared)


def _detection(column: str, wrong_only: bool = False) -> FeedbackType:
    return FeedbackType(
        *("columns", "detection", (column,), _DETECTION_IDS),
        free_when_given=True,
        wrong_only=wrong_only,
    )


_KINETICS = tuple(f"kinetics_id_{number}" for number in range(5))
_ANNOTATIONS = tuple(
    f"annotation_{kind}_{number}" for number in range(1, 5) for kind in ("name", "value")
)

IMAGE_CLASSIFICATION = Domain(
    name="image_classification",
    unknown_counted=True,
    columns=("instance_id", "detection", "classification"),
    integers=("detection", "classification"),
    changed="detection",
    novel="detection",
    label="classification",
    unknown="first",
    results=_RESULTS,
    feedback={
        "classification": _label("classification", undeclared=True),
        "score": _ACCURACY,
        "detection": _detection("detection"),
    },
    required=3,
)

ACTIVITY_RECOGNITION = Domain(
    name="activity_recognition",
    columns=(
        *("instance_id", "novel", "detection", "activity", "spatial", "temporal"),
        *_KINETICS,
        *_ANNOTATIONS,
    ),
    integers=("novel", "detection", "activity", "spatial", "temporal"),
    changed="detection",
    novel="novel",
    label="activity",
    unknown="last",
    results=_RESULTS,
    feedback={
        "classification": FeedbackType("columns", "classification", _KINETICS),
        "labels": FeedbackType("columns", "classification", ("activity",), wrong_only=True),
        "score": _ACCURACY,
        "detection": _detection("novel", wrong_only=True),
    },
    required=4,
)

TRANSCRIPTS = Domain(
    name="transcripts",
    columns=(
        *("instance_id", "text", "novel", "representation", "detection", "writer_id"),
        *("pen_pressure", "letter_size", "word_spacing", "slant_angle", "attribute"),
    ),
    integers=("novel", "detection", "writer_id"),
    changed="detection",
    novel="novel",
    label="writer_id",
    unknown="last",
    results={**_RESULTS, "transcription": "text"},
    feedback={
        "classification": _label("writer_id"),
        "transcription": FeedbackType("distance", "transcription", ("text",)),
        "score": _ACCURACY,
    },
    required=6,
)

NLT = Domain(
    name="nlt",
    columns=(
        *("instance_id", "text", "reported_writer_id", "real_writer_id", "sentiment", "product"),
        *("novelty_indicator", "novel_instance", "text_id"),
    ),
    integers=("real_writer_id", "novelty_indicator", "novel_instance"),
    changed="novelty_indicator",
    novel="novel_instance",
    label="real_writer_id",
    unknown="last",
    results={**_RESULTS, "labels": "labels"},
    feedback={
        "score": FeedbackType("points", "labels"),
        "detection": _detection("novel_instance", wrong_only=True),
        "labels": FeedbackType(
            "columns", "labels", ("real_writer_id",), counted=False, wrong_only=True, points=1
        ),
    },
    served=("instance_id", "reported_writer_id", "text", "sentiment", "product"),
    served_quoted=("text",),
    encoding="utf-16",
    required=8,
)

NOVELTY = Domain(
    name="novelty",
    columns=("instance_id", "novel", "detection", "classification", "sample_id", "view"),
    integers=("novel", "detection", "classification"),
    changed="detection",
    novel="novel",
    label="classification",
    unknown="first",
    results=_RESULTS,
    feedback={
        "classification": _label("classification"),
        "score": _ACCURACY,
        "detection": _detection("novel"),
    },
    verbatim=("sample_id",),
    required=4,
)

DOMAINS: dict[str, Domain] = {
    domain.name: domain
    for domain in (IMAGE_CLASSIFICATION, ACTIVITY_RECOGNITION, TRANSCRIPTS, NLT, NOVELTY)
}
# The type of results that a test is measured by, beside detection.
MEASURED: Mapping[str, Values] = {"OND": "classification", "CONDDA": "characterization"}
PROTOCOLS = tuple(MEASURED)

# Metadata that an agent may see and that a hint "key=number" may replace for its session.
SHOWN_METADATA = (
    *("protocol", "known_classes", "max_novel_classes", "round_size", "feedback_max_ids"),
    *("pre_novelty_batches", "pre_novelty_training", "max_detection_feedback_ids"),
)
# Some of it tells when the world changes, or how many classes are novel: not in an evaluation.
TELLING_METADATA = ("max_novel_classes", "pre_novelty_batches", "pre_novelty_training")
RED_LIGHT = "red_light"


def domain_named(name: str) -> Domain:
    """The declaration of a domain."""
    if name not in DOMAINS:
        raise ConfigError(f"domain {name!r} is not declared; there are {', '.join(DOMAINS)}")
    return DOMAINS[name]
