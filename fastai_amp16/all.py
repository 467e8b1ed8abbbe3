"Everything public: `from fastai_amp16.all import *`, after fastai's own star import"
from .scaler import DynamicScaler
from .precision import PrecisionPlan,half_forward,register_norm
from .optimizer import AdamW16,Adam16,RAdam16,Lamb16,QHAdam16,Larc16,RMSProp16,ranger16,FusedAdam
from .clip import GradientNormClip
from .report import PrecisionReport
from .history import GradNorm,LossScale,SkippedSteps
from .messages import PrecisionWarning
from .callback import DynamicMixedPrecision
from . import learner # noqa: F401 (`Learner.to_fp16_dynamic` and others)
from .exam import Finding
from .doctor import Checkup,swap_module

__all__ = ['DynamicScaler', 'PrecisionPlan', 'half_forward', 'register_norm', 'AdamW16', 'Adam16', 'RAdam16', 'Lamb16', 'QHAdam16',
           'Larc16', 'RMSProp16', 'ranger16', 'FusedAdam', 'GradientNormClip', 'PrecisionReport', 'GradNorm', 'LossScale', 'SkippedSteps',
           'PrecisionWarning', 'DynamicMixedPrecision', 'Checkup', 'Finding', 'swap_module']
