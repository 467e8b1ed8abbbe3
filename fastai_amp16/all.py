"Everything public: `from fastai_amp16.all import *`, after fastai's own star import"
from .scaler import *
from .precision import *
from .optimizer import *
from .clip import *
from .diagnose import PrecisionReport
from .callback import *
