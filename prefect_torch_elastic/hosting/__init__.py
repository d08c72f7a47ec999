"""The work pool's side of a dispatched call: what a pool's job does between its start and its last word.

`host.carry_out` is the way in; `dispatch` is the other side.
"""
