import os,warnings
from hypothesis import settings

os.environ.setdefault('OMP_NUM_THREADS', '1') # threads that wait for a busy core spin, and a test takes many times as long

with warnings.catch_warnings(): # torch's, at the import of fastai: that torch.jit.script is deprecated
    warnings.simplefilter('ignore', FutureWarning)
    import fastai.callback.all # noqa: F401 (as a notebook does: it brings progress bars and schedules to `Learner`)

settings.register_profile('repo', deadline=None, derandomize=True)
settings.load_profile('repo')

# not yet in step with the rebuilt package; each comes back when all of it passes
collect_ignore = []

def pytest_collection_modifyitems(items):
    "Notebooks come last, that of the callback at the very end: they define everything anew and patch it onto fastai's classes"
    items.sort(key=lambda o: (o.name.startswith('test_notebook'), '05_callback' in o.name))
