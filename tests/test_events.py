"Callbacks get the same events as in fastai's own loop, whoever comes, goes or changes meanwhile"
import pytest
from fastai.basics import Callback,CancelBatchException,CancelStepException,Learner
from common import fit,learner

of_parts = [f'{when}_{part}' for part in ('batch','backward','step') for when in ('before','after','after_cancel')]
events = [*of_parts, 'after_pred', 'after_loss']

def logs(event): return lambda self: self.learn.log.append((type(self).__name__, event, self.iter))

Quiet = type('Quiet', (Callback,), {}) # does nothing
Every = type('Every', (Callback,), {'order':7, **{o: logs(o) for o in events}})
Early = type('Early', (Callback,), {'order':-6, 'before_batch':logs('before_batch'), 'after_loss':logs('after_loss')})
Few = type('Few', (Callback,), {'order':-5, 'after_loss':logs('after_loss'), 'after_step':logs('after_step'), 'run_valid':False})

class OwnCall(Callback):
    "Looks at each event by itself"
    order = 3
    def __call__(self, event_name):
        if event_name in events: self.learn.log.append(('OwnCall', event_name))
        return super().__call__(event_name)

class At(Callback):
    "Does something when `event` comes in the second batch"
    order = 1
    def __init__(self, event, do): setattr(self, event, lambda: do(self) if self.training and self.iter==1 else None)

def come(cb): cb.learn.add_cb(Few())
def go(cb): cb.learn.remove_cb(cb.learn.early)
def change_order(cb): cb.learn.every.order = -7
def get_method(cb): cb.learn.quiet.after_loss = lambda: cb.learn.log.append('a new method')
def lose_method(cb): cb.learn.every.run = False
def stop(cb): raise StopIteration('no more') # fastai ends the event, not the epoch
def cancel_batch(cb): raise CancelBatchException
def cancel_step(cb): raise CancelStepException

class OwnLoop(Learner):
    def _call_one(self, event_name):
        if event_name in events: self.log.append(f'my own {event_name}')
        super()._call_one(event_name)

def log(do, event, to, cls=Learner):
    learn = to(learner(n=64, cbs=[Every(), Early(), Quiet(), OwnCall(), At(event, do)]))
    learn.__class__,learn.log = cls,[]
    fit(learn, 1)
    return learn.log

# what a method or an order changes in the middle of a batch holds from the next batch on
@pytest.mark.parametrize('do,event', [
    *[(o,'before_batch') for o in (come,go,lose_method,stop,cancel_batch)], (come,'after_loss'), (go,'after_loss'), (stop,'after_pred'),
    (change_order,'after_batch'), (get_method,'after_batch'), (come,'after_step'), (cancel_step,'before_step'), (stop,'after_batch')],
    ids=lambda o: getattr(o, '__name__', o))
def test_the_same_events_as_in_fp32(do, event):
    assert log(do, event, Learner.to_fp16_dynamic)==log(do, event, Learner.to_fp32)

def test_a_loop_of_ones_own_over_callbacks():
    a,b = [log(lambda cb: None, 'after_loss', to, OwnLoop) for to in (Learner.to_fp32,Learner.to_fp16_dynamic)]
    assert a==b and 'my own after_loss' in a

def test_only_those_that_act_are_called():
    calls = []
    class Counts(type(Quiet())):
        def __getattribute__(self, k):
            if k in events: calls.append(k)
            return super().__getattribute__(k)
    fit(learner(n=16*20, cbs=Counts()).to_fp16_dynamic(), 1)
    assert calls and max(map(calls.count, calls))<=4 # looked for once, or again when callbacks have changed
