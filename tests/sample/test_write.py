"""`novelty sample`: every generator is found, and a second call does nothing."""

import pytest

from schemas.errors import ConfigError
from tasks.sample import condda
from tasks.sample.write import sample_names, write_sample


def test_every_benchmark_has_sample_data():
    assert sample_names() == ["condda", "kowl", "novelcraft", "semantic", "threedos"]


def test_second_call_leaves_everything_alone(tmp_path, monkeypatch, capsys):
    write_sample(tmp_path, seed=1, only=["condda"])
    (changed, *_) = sorted((tmp_path / "condda").rglob("*.csv"))
    changed.write_text("changed by hand")
    monkeypatch.setattr(condda, "write_condda", lambda *arguments: pytest.fail("written again"))
    write_sample(tmp_path, seed=1, only=["condda"])
    assert "as before" in capsys.readouterr().out
    assert changed.read_text() == "changed by hand"


def test_another_seed_writes_again(tmp_path):
    write_sample(tmp_path, seed=1, only=["condda"])
    first = sorted((tmp_path / "condda").rglob("*_single_df.csv"))[0].read_bytes()
    write_sample(tmp_path, seed=2, only=["condda"])
    assert sorted((tmp_path / "condda").rglob("*_single_df.csv"))[0].read_bytes() != first


@pytest.mark.slow
def test_two_at_once_write_what_one_writes(tmp_path, capsys):
    names = ["condda", "semantic"]
    write_sample(tmp_path / "both", only=names)
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line.split()[1] for line in lines) == [f"{name}:" for name in names]
    for name in names:
        write_sample(tmp_path / "alone", only=[name])
    both, alone = (
        {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        for root in (tmp_path / "both", tmp_path / "alone")
    )
    assert both == alone


def test_unknown_name_is_said(tmp_path):
    with pytest.raises(ConfigError, match="no sample data for x; there are: condda"):
        write_sample(tmp_path, only=["x"])
