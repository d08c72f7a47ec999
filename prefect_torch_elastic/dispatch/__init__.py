"""A task body in another work pool: the call goes there through the run folder, its ending comes back.

`driver.run_in_pool` is the way in; `hosting` is the other side.
"""
