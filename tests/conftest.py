import os,warnings
from fastcore.basics import defaults
from hypothesis import settings

os.environ.setdefault('OMP_NUM_THREADS', '1') # threads that wait for a busy core spin, and a test takes many times as long

with warnings.catch_warnings(): # torch's, at the import of fastai: that torch.jit.script is deprecated
    warnings.simplefilter('ignore', FutureWarning)
    import fastai.callback.all # noqa: F401 (as a notebook does: it brings progress bars and schedules to `Learner`)

defaults.cpus = 0 # no worker processes for data: a fork of a process with threads may never end

settings.register_profile('repo', deadline=None, derandomize=True)
settings.load_profile('repo')

def pytest_collection_modifyitems(items):
    "Notebooks come last, that of the callback at the very end: they define everything anew and patch it onto fastai's classes"
    items.sort(key=lambda o: (o.name.startswith('test_notebook'), '_callback' in o.name))
