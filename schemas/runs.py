"""What every benchmark's configuration says of runs, and the facts of one run."""

from typing import Any, Literal

from pydantic import Field, field_validator

from schemas.config import Choice, Settings

Origin = Literal["trained", "frozen", "imported"]


class RunChoices(Settings):
    """Which models are fitted and which scores are made; the same options in every benchmark."""

    models: Choice = Field({})
    """Models by name, or all that fit; `--models.<name>.<setting>` changes one of its settings."""
    networks: Choice = Field({})
    """Networks below the models, where a model takes one (default: the benchmark's own)."""
    scores: Choice = Field({"all": {}})
    """Scores of what models put out, by name, or all that fit."""
    predictors: Choice = Field({})
    """Predictors that live over time, by name, or all that fit."""
    preset: str = "small"
    """Named settings of all plug-ins: `small` is for a CPU, `paper` is the paper's."""
    seeds: tuple[int, ...] = Field((0,), min_length=1)
    """One run for each."""
    protocols: tuple[str, ...] = ()
    """Protocols to make runs for (default: every one that has enough samples)."""
    train: dict[str, Any] = Field({})
    """`--train.<setting>` changes a setting of all models that have it; a model's own wins."""
    device: str = "auto"
    """`auto`, `cpu` or `cuda`."""
    trainings: int | None = Field(None, ge=1)
    """Trainings at once on a CPU (default: as many as their `cpu_threads` leave cores for)."""
    trainings_per_gpu: int = Field(1, ge=1)
    """Trainings at once on each GPU."""
    memory: float = Field(4.0, gt=0)
    """GB of decoded pictures and of features that a training keeps in memory; more lies in a file
    of the lake while it runs. No result depends on it."""

    @field_validator("seeds")
    @classmethod
    def _each_once(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) < len(seeds):
            raise ValueError(f"a seed stands twice in {', '.join(map(str, seeds))}")
        return seeds


class RunFacts(Settings):
    """All that decides the numbers of a run; `tasks.evaluation.runs` makes its id of them."""

    benchmark: str
    protocol: str | None
    model: str
    network: str = "none"
    preset: str = "none"
    settings: dict[str, Any] = Field({})
    """All settings of model, network and training, resolved."""
    changed: dict[str, Any] = Field({})
    """What differs from the preset."""
    seed: int | None = None
    origin: Origin = "trained"
    base_runs: tuple[str, ...] = ()
    versions: dict[str, int] = Field({})
    """Versions of the plug-ins and of the trainer."""
    weights: dict[str, str] = Field({})
    """SHA-256 of checkpoint files that it starts from, by name."""
    precision: str = "float32"
    fit_key: str
    """Key of the rows that it is fitted on."""
