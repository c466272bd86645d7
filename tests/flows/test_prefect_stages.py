"""Stages inside a real Prefect flow: same bytes, only missing shards become tasks, account kept."""

import pytest

from flows.tracked import tracked_flow
from schemas.errors import TooManyRejects
from tests.cluster_stages import wait_for
from tests.toy import build_toy, parquet_bytes, write_raw


def task_runs() -> list:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        return [run for run in client.read_task_runs() if "toy" in run.tags]


def test_flow_makes_the_same_bytes_and_skips_the_second_time(tmp_path, prefect_api):
    from prefect.client.orchestration import get_client

    write_raw(tmp_path / "raw")
    build_toy(tmp_path / "plain", tmp_path / "raw")
    run = tracked_flow("toy", lambda config: build_toy(config["lake"], tmp_path / "raw"))
    run({"lake": tmp_path / "lake"})
    assert parquet_bytes(tmp_path / "lake") == parquet_bytes(tmp_path / "plain")
    shards = {*(f"read_lines/f{i}.txt" for i in range(6)), "add_up/all"}
    # The server learns a task's name a little after the task has run.
    wait_for(lambda: {task.name.split("-")[0] for task in task_runs()} == shards)
    first = task_runs()
    with get_client(sync_client=True) as client:
        kept = {artifact.key: artifact.data for artifact in client.read_artifacts()}
    assert "| 6 | 6 | 120 | 117 | 3 |" in kept["toy-read-lines"]
    run({"lake": tmp_path / "lake"})
    assert len(task_runs()) == len(first)


def test_user_errors_come_out_of_the_flow(tmp_path, prefect_api):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "x.txt").write_text("junk\njunk\n")
    run = tracked_flow("toy", lambda config: build_toy(config["lake"], tmp_path / "raw"))
    with pytest.raises(TooManyRejects):
        run({"lake": tmp_path / "lake"})
