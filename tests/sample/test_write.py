"""`novelty sample`: every generator is found, and a second call does nothing."""

import pytest

from schemas.errors import ConfigError, MissingExtra
from tasks.sample import condda, write
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


def test_unknown_name_is_said(tmp_path):
    with pytest.raises(ConfigError, match="no sample data for x; there are: condda"):
        write_sample(tmp_path, only=["x"])


def test_what_lacks_a_library_is_left_out_unless_it_was_asked_for(tmp_path, monkeypatch, caplog):
    def write_condda(folder, seed):
        raise MissingExtra("open3d does not load")

    monkeypatch.setattr("tasks.sample.condda.write_condda", write_condda)
    monkeypatch.setattr(write, "sample_names", lambda: ["condda"])
    write_sample(tmp_path)
    assert "sample condda: left out: open3d does not load" in caplog.text
    assert not list(tmp_path.iterdir())
    with pytest.raises(MissingExtra):
        write_sample(tmp_path, only=["condda"])
