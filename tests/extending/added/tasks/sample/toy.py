"""Toy sample: points around three places, one of them novel."""

from pathlib import Path

import numpy as np


def write_toy(out: Path, seed: int = 0) -> None:
    """One CSV file: sample_id, class, split, x, y."""
    draws = np.random.default_rng(seed)
    lines = ["sample_id,class,split,x,y"]
    for number in range(90):
        name, split = "abc"[number % 3], ("train", "valid", "test")[number // 3 % 3]
        x, y = np.array([(0, 0), (3, 0), (0, 3)]["abc".index(name)]) + draws.normal(0, 0.5, 2)
        lines.append(f"p{number:03d},{name},{split},{x:.4f},{y:.4f}")
    lines.append("p999,a,train,nowhere,0")
    out.mkdir(parents=True, exist_ok=True)
    (out / "points.csv").write_text("\n".join(lines) + "\n")
