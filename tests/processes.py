"Two real processes, over gloo on a CPU unless told otherwise, which live on, with their group, from test to test"
import tempfile,traceback,warnings
from concurrent.futures import ProcessPoolExecutor,TimeoutError as NoAnswer
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
import torch
import torch.distributed as dist

timeout = 20 # seconds, for which a rank waits for another

def _work(rank, path, backend, context, f, args):
    "Run `f` as process `rank` of two"
    torch.set_num_threads(1)
    warnings.simplefilter('ignore', FutureWarning)
    if not dist.is_initialized():
        dist.init_process_group(backend, init_method=f'file://{path}', rank=rank, world_size=2, timeout=timedelta(seconds=timeout))
    try:
        with context(rank): return f(rank, *args)
    except BaseException: raise AssertionError('\n'.join(traceback.format_exc().splitlines()[-12:])) from None # others may not be pickled

def _error(future):
    try: return future.exception(3*timeout)
    except NoAnswer: return f'no answer within {3*timeout} seconds' # a deadlock, of which gloo does not know

class Processes:
    "Call it with a function, which runs in both, and its arguments besides the rank; gives what it returns in each"
    pools = None
    def __init__(self, context, preload, backend='gloo'): # a context for each run, which takes the rank, and modules that are imported once
        self.context,self.backend,self.forks = context,backend,get_context('forkserver')
        self.forks.set_forkserver_preload(preload)
    def __call__(self, f, *args):
        if self.pools is None:
            self.pools = [ProcessPoolExecutor(1, self.forks) for _ in range(2)]
            self.store = Path(tempfile.mkdtemp())/'store'
        futures = [p.submit(_work, i, self.store, self.backend, self.context, f, args) for i,p in enumerate(self.pools)]
        errors = [f'rank {i}: {e}' for i,o in enumerate(futures) if (e := _error(o))]
        if not errors: return [o.result() for o in futures]
        self.end()
        raise AssertionError('\n'.join(errors))
    def end(self):
        for pool in self.pools or ():
            for p in list(pool._processes.values()): p.kill()
        self.pools = None
