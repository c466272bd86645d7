"""NovelCraft: game episodes (PNG + JSON world states) to labelled frames.

World states are parsed (`worldstate`), turned into boxes and a camera (`scene`) and rendered to
masks of the novel objects by one of two renderers that agree: `raycast` (fast) and `blender` (the
reference). `masks` stores and compares masks; `calibrate` repeats the paper's camera search.
"""
