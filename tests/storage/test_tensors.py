"""Safetensors files: the bytes of the library, and back."""

import json

import torch
from safetensors.torch import save_file

from storage.tensors import read_header, read_tensors, write_tensors


def test_the_bytes_are_those_of_safetensors(tmp_path):
    kinds = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.bool)
    kinds += (torch.int64, torch.int32, torch.int16, torch.int8)
    state = {f"{number}.ü": torch.arange(3 + number).to(kind) for number, kind in enumerate(kinds)}
    state |= {"empty": torch.empty(0, 3), "scalar": torch.tensor(1.5), 'b"': torch.ones(2, 3, 4)}
    ours = tmp_path / "ours.safetensors"
    write_tensors(ours, state, {"name": "ä"})
    head = ours.read_bytes()[8:]
    length = int.from_bytes(ours.read_bytes()[:8], "little")
    metadata = json.loads(head[:length])["__metadata__"]
    save_file(state, tmp_path / "theirs", metadata)
    assert ours.read_bytes() == (tmp_path / "theirs").read_bytes()
    assert read_header(ours) == {"name": "ä"}
    read = read_tensors(ours)
    assert all(torch.equal(read[name], value) for name, value in state.items())
