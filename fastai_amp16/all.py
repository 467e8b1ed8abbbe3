"Everything public: `from fastai_amp16.all import *`, after fastai's own star import"
from .train.scaler import DynamicScaler
from .precision.plan import PrecisionPlan,half_forward,register_norm
from .precision.swap import swap_module
from .optim.optimizer import AdamW16,Adam16,RAdam16,Lamb16,QHAdam16,Larc16,RMSProp16,ranger16,FusedAdam
from .optim.clip import GradientNormClip
from .diagnosis.report import PrecisionReport
from .train.history import GradNorm,LossScale,SkippedSteps
from .diagnosis.messages import PrecisionWarning
from .callback import DynamicMixedPrecision
from . import ask,learner # noqa: F401 (`Learner.to_fp16_dynamic`, `diagnose_fp16` and others)
from .doctor import Checkup,Finding
from .speed import PrecisionComparison

__all__ = ['DynamicScaler', 'PrecisionPlan', 'half_forward', 'register_norm', 'swap_module',
           'AdamW16', 'Adam16', 'RAdam16', 'Lamb16', 'QHAdam16', 'Larc16', 'RMSProp16', 'ranger16', 'FusedAdam',
           'GradientNormClip', 'PrecisionReport', 'GradNorm', 'LossScale', 'SkippedSteps', 'PrecisionWarning',
           'DynamicMixedPrecision', 'Checkup', 'Finding', 'PrecisionComparison']
