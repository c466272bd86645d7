"""Renderer `blender`: the reference, Cycles on the CPU through bpy.

Enters: world states. Leaves: masks of the novel pixels (spec 2.3). Two settings by name:
`published` repeats the labelling code: the scene loaded anew for each frame, one object per block, 128
samples, Blackman-Harris 1.5 px, Filmic, 8-bit grey, novel where grey >= 128. `exact` asks Cycles for the
same sample rays as `raycast`: one merged mesh with a material per face, an image of 8x8 pixels for each
pixel, one ray each through its centre, cut to the rectangle of the novel boxes.

bpy may crash on exit and grows over thousands of renders, so callers run `render_states` in child
processes, a chunk of frames each. Where surfaces of two boxes coincide, Cycles picks either.
"""

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from schemas.errors import ConfigError, MissingDependency, RecordError
from tasks.novelcraft.raycast import SAMPLES, novel_window, pixels_covered
from tasks.novelcraft.scene import Scene, View, build_scene
from tasks.novelcraft.worldstate import parse_world_state, world_state

SETTINGS = ("exact", "published")
GREY_THRESHOLD = 128
