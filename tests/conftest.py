import warnings
from hypothesis import settings

with warnings.catch_warnings(): # torch's, at the import of fastai: that torch.jit.script is deprecated
    warnings.simplefilter('ignore', FutureWarning)
    import fastai.basics # noqa: F401

settings.register_profile('repo', deadline=None, derandomize=True)
settings.load_profile('repo')
