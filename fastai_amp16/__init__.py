__version__ = "0.1.0"
from . import all # noqa: F401 (what a `Learner` needs, whichever module you import)
