from __future__ import annotations
import os, time, sys
from prefect import task, flow
from prefect_torch_elastic import elastic_task, get_context, GangFailed

def test_huge_message(in_flow):
    @elastic_task(nproc_per_node=2, max_restarts=0)
    def train():
        raise ValueError("x" * 5_000_000)
    t=time.monotonic()
    state = in_flow(lambda: train(return_state=True))
    print("HUGE", time.monotonic()-t, len(state.message), len(str(state.result(raise_on_failure=False))), state.name)

def test_huge_traceback(in_flow):
    @elastic_task(nproc_per_node=2, max_restarts=0)
    def train():
        def f(n): return f(n+1)
        f(0)
    state = in_flow(lambda: train(return_state=True))
    print("REC", len(state.message), state.message[:300])

def test_run_key(in_flow):
    @elastic_task(nproc_per_node=1, run_key="x-{nope}")
    def train(a): pass
    state = in_flow(lambda: train(1, return_state=True))
    print("RUNKEY", state.message[:300])
    for key in ("{0}", "a/b/../c", "x" * 300, "", "{a.__class__}"):
        state = in_flow(lambda: train_key(key)(1, return_state=True))
        print("RUNKEY2", repr(key[:20]), state.name, state.message and state.message[:200], state.is_completed() and state.result())

def train_key(key):
    @elastic_task(nproc_per_node=1, run_key=key)
    def train(a): return get_context().run_key[:40]
    return train

def test_loader(in_flow):
    @elastic_task(nproc_per_node=2, max_restarts=0)
    def train(method):
        import torch
        loader = torch.utils.data.DataLoader(torch.arange(8), batch_size=2, num_workers=2, multiprocessing_context=method)
        return [b.tolist() for b in loader]
    for m in ("fork", "spawn", "forkserver"):
        t=time.monotonic()
        state = in_flow(lambda: train(m, return_state=True))
        print("LOADER", m, time.monotonic()-t, state.name, str(state.message)[:1500] if not state.is_completed() else state.result())

def test_atexit(in_flow, note, notes):
    @elastic_task(nproc_per_node=1)
    def train():
        import atexit
        atexit.register(note, "bye")
    in_flow(train)
    print("ATEXIT", notes.read_text())

def test_nested(in_flow):
    @elastic_task(nproc_per_node=2)
    def train(): return get_context().world_size
    @task
    def outer(): return train()
    print("NESTED", in_flow(outer))

def test_env_pile(in_flow):
    @elastic_task(nproc_per_node=1)
    def train(): pass
    import psutil
    for i in range(4):
        in_flow(train.with_options(env={"A": str(i)}))
    print("PILE", sum("prefect_torch_elastic.node" in " ".join(p.cmdline()) for p in psutil.Process().children()))

def test_subflow(in_flow):
    @elastic_task(nproc_per_node=2)
    def train(): return get_context().flow_run_id
    @flow
    def sub(): return train()
    print("SUB", in_flow(sub), in_flow(train))
    import psutil
    print("PILE", sum("prefect_torch_elastic.node" in " ".join(p.cmdline()) for p in psutil.Process().children()))

def test_big_result(in_flow):
    @elastic_task(nproc_per_node=2)
    def train():
        import torch
        return torch.ones(75_000_000)
    t=time.monotonic(); r=in_flow(train); print("BIG", time.monotonic()-t, r.sum())
def test_sysexit_text(in_flow):
    @elastic_task(nproc_per_node=2, max_restarts=0)
    def train():
        sys.exit("bad config")
    print("EXIT", in_flow(lambda: train(return_state=True)).message[:200])
def test_stdout_closed(in_flow):
    @elastic_task(nproc_per_node=2, max_restarts=0)
    def train():
        sys.stdout.close(); sys.stderr.close(); os.close(1); os.close(2)
        return 1
    print("CLOSED", in_flow(lambda: train(return_state=True)).message)
