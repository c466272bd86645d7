"""Tests of tasks.condda; here agents, and the published test that has expected numbers."""

import csv

import numpy as np

from tasks.condda.agent import Agent, AgentSettings
from tasks.predictors import find_predictor
from tests.shared import shared_path

TEST = "OND.10.90001.2100554"


def published_activity() -> dict[str, np.ndarray]:
    """Arguments of `evaluate`: the published agent's results and the ground truth."""
    novel, labels = truth(TEST, "activity_recognition", 1, 3)
    return {
        "detection": posted(f"{TEST}_PreComputedONDAgent_detection")[:, 0],
        "classification": posted(f"{TEST}_PreComputedONDAgent_classification"),
        "novel": novel,
        "labels": labels,
    }


def truth(test: str, domain: str, novel: int, label: int) -> tuple[np.ndarray, np.ndarray]:
    """The two numbered columns of a test's ground truth."""
    path = shared_path(f"sailon/sail-on-client/data/OND/{domain}/{test}_single_df.csv")
    with path.open(newline="") as lines:
        rows = list(csv.reader(lines, quotechar="|"))[1:]
    return np.array([int(row[novel]) for row in rows]), np.array([int(row[label]) for row in rows])


def posted(name: str) -> np.ndarray:
    """The numbers of a result file, without the instance ids."""
    path = shared_path(f"sailon/sail-on-client/mock_results/activity_recognition/{name}.csv")
    with path.open(newline="") as lines:
        return np.array([[float(value) for value in row[1:]] for row in csv.reader(lines)])


def make_agent(name: str, seed: int = 0, agent: dict | None = None, **settings: object) -> Agent:
    """An agent of the predictor called `name`; `agent` are settings of the agent itself."""
    kind = find_predictor(name)
    predictor = kind(kind.resolve("small", settings), device="cpu")
    return Agent(predictor, AgentSettings(**(agent or {})), seed)
