"Everything public: `from fastai_amp16.all import *`, after fastai's own star import"
from .scaler import *
from .precision import *
from .optimizer import *
from .clip import *
from .diagnose import PrecisionReport # noqa: F401 (its functions have names that are too common)
from .callback import *
from .doctor import *
