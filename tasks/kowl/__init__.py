"""KOWL-718 (Prijatelj et al., JAIR 81, 2024): human activity recognition in an open world.

Kinetics lists enter (`lists`), become one table of clips (`unify`, rules named in `policies`), and
leave as increments (`tasks.kowl.increments`); `drift` compares two snapshots of a list.
"""
