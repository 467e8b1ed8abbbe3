"The table of what comes after an attempt, driven by plain numbers: gradients are finite up to a loss scale, and nothing else is known"
import math
import pytest
from hypothesis import given,strategies as st
from fastai_amp16.train.decide import Attempts,Next,Outcome,next_scale,what_next

def after(record, outcome):
    "What comes after an attempt with this `outcome`"
    record.note(outcome)
    return what_next(record, outcome)

def drive(record, start, limit, most=50):
    "The loss scales that are tried, from `start`, where gradients are finite at `limit` and below; and what ends that"
    tried,record.scale = [],start
    for _ in range(most):
        tried.append(record.scale)
        what,new = after(record, Outcome.fine if record.scale<=limit else Outcome.overflow)
        if what is not Next.again: return tried,what
        record.scale = new
    raise AssertionError(f'no end: {tried}')

def powers(*exponents): return [2.**e for e in exponents]

# --- the first scale

def test_a_scale_that_fits_is_tried_once():
    assert drive(Attempts(floor=2.**-14), 2.**16, 2.**20)==([2.**16], Next.step)

def test_from_2_to_the_24_to_2_to_the_13_in_at_most_eight_runs():
    tried,what = drive(Attempts(floor=2.**-14), 2.**24, 2.**13)
    assert what is Next.step and len(tried)<=8 and tried[-1]==2.**12 # one power of two is left for the next batch

quarters = st.integers(-120, 120).map(lambda n: n/4)

@given(start=st.integers(-14, 24), limit=quarters)
def test_every_search_ends_at_a_scale_that_fits_with_one_power_of_two_to_spare(start, limit):
    tried,what = drive(Attempts(floor=2.**-14), 2.**start, 2.**limit)
    fits = math.floor(limit)
    assert tried==list(dict.fromkeys(tried)) or tried[-1] in tried[:-1] # at most the last one has been tried before
    assert all(2.**-14<=s<=2.**start for s in tried) and len(tried)<=9
    if start<=fits: assert tried==[2.**start] and what is Next.step
    elif what is Next.step: assert tried[-1]==2.**max(fits-1, -14)
    else: assert what is Next.diagnose and min(tried)>2.**limit

@given(start=st.integers(10, 24), limit=quarters)
def test_a_scale_within_24_powers_of_two_is_found_without_a_diagnosis(start, limit):
    if start-limit<24: assert drive(Attempts(floor=2.**-14), 2.**start, 2.**limit)[1] is Next.step

@given(start=st.floats(1, 2.**24), limit=st.floats(1, 2.**24))
def test_scales_that_are_no_powers_of_two_are_searched_as_well(start, limit):
    tried,what = drive(Attempts(floor=2.**-14), start, limit)
    assert what is Next.step and tried[-1]<=limit and (tried[-1]==start or tried[-1]>limit/8)

def test_a_search_ends_at_the_floor():
    tried,what = drive(Attempts(floor=2.**4), 2.**8, 2.**2)
    assert tried==powers(8, 4) and what is Next.diagnose

# --- an outlier, where steps were taken before

@pytest.mark.parametrize('limit,tried', [(15, powers(16, 15)), (14, powers(16, 15, 14)), (13, powers(16, 15, 14, 6)),
                                         (0, powers(16, 15, 14, 6))])
def test_a_proven_scale_is_halved_twice_before_it_falls_far(limit, tried):
    res,what = drive(Attempts(floor=2.**-14, proven=True), 2.**16, 2.**limit)
    assert res==tried and what is (Next.step if limit<16 and tried[-1]<=2.**limit else Next.diagnose)

@given(start=st.integers(-14, 24), limit=quarters)
def test_for_a_single_batch_at_most_four_scales_are_tried(start, limit):
    tried,what = drive(Attempts(floor=2.**-14, proven=True), 2.**start, 2.**limit)
    assert len(tried)<=4 and (what is Next.step)==(tried[-1]<=2.**limit)

# --- what no scale answers

def again(record, *outcomes):
    "What comes after each of the `outcomes`; an attempt in fp32 follows a `Next.reference`"
    res = []
    for o in outcomes:
        record.scale = 2.**10
        res.append(after(record, o)[0])
        record.kind = Next.reference if res[-1] is Next.reference else Next.again
        record.diagnoses += res[-1] is Next.diagnose
    return res

fine,overflow,broken = Outcome.fine,Outcome.overflow,Outcome.broken

@pytest.mark.parametrize('attrs,outcomes,nexts', [
    (dict(floor=1.), [broken], [Next.diagnose]), # a forward pass: no scale is tried
    (dict(floor=1.), [broken,broken,broken], [Next.diagnose,Next.diagnose,Next.fp32]), # what the first one mended may uncover another fault
    (dict(floor=2.**10, diagnoses=2), [overflow], [Next.fp32]),
    (dict(floor=2.**10, diagnoses=2, can_heal=False), [overflow], [Next.skip]),
    (dict(kind=Next.fp32), [fine], [Next.step]),
    (dict(kind=Next.fp32), [broken], [Next.skip]),
    (dict(), [overflow], [Next.diagnose]), # bf16
    (dict(static=True), [overflow], [Next.skip]),
    (dict(static=True), [broken], [Next.diagnose]), # that is not the scale's fault
    (dict(can_rerun=False, floor=1.), [overflow], [Next.skip]),
    (dict(can_rerun=False, floor=1.), [broken], [Next.skip]),
    (dict(can_rerun=False, floor=1.), [fine], [Next.step]),
    (dict(unusable=True, floor=1.), [fine], [Next.skip]), # a run that only arrives where the step would begin
    (dict(unusable=True, floor=1.), [overflow], [Next.skip]),
    (dict(fp32_first=True, floor=1.), [overflow,broken], [Next.reference,Next.skip]), # fp32 cannot hold it either: one more run, no more
    (dict(fp32_first=True, floor=1.), [overflow,overflow], [Next.reference,Next.skip]),
    (dict(fp32_first=True, floor=1.), [broken,broken], [Next.reference,Next.skip]),
    (dict(fp32_first=True, floor=1.), [broken,fine], [Next.reference,Next.diagnose]), # half precision is at fault
    (dict(fp32_first=True, floor=1.), [fine], [Next.step])])
def test_what_comes_next(attrs, outcomes, nexts): assert again(Attempts(**attrs), *outcomes)==nexts

def test_a_step_of_the_fp32_reference_is_never_taken():
    for outcome in Outcome:
        for lost in (False,True): assert what_next(Attempts(kind=Next.reference, unusable=lost), outcome)[0] in (Next.skip,Next.diagnose)

def test_what_was_mended_may_try_all_scales_again():
    record = Attempts(floor=2.**-14, fp32_first=True)
    drive(record, 2.**16, 2.**-20)
    record.reset_search()
    assert drive(record, 2.**16, 2.**9)[1] is Next.step and record.finite_scales

@given(st.data(), st.booleans(), st.booleans(), st.sampled_from([None, 2.**-14, 2.**16]), st.booleans())
def test_whatever_comes_out_of_the_attempts_the_step_ends(data, proven, fp32_first, floor, static):
    "Also where the same scale fits now and then; the step is taken only after a fine attempt, at a scale within the bounds"
    record,kind = Attempts(floor=floor, static=static, proven=proven, fp32_first=fp32_first, scale=2.**16),st.sampled_from(list(Outcome))
    for n in range(40):  # noqa: B007
        outcome = data.draw(kind)
        what,new = after(record, outcome)
        if what in (Next.step,Next.skip): break
        record.kind = Next.reference if what is Next.reference else Next.again
        if what is Next.again:
            record.scale = new
            assert new is not None and (floor or 0)<=new<=2.**16 and not static
        if what is Next.diagnose:
            record.diagnoses += 1
            if data.draw(st.booleans()): record.reset_search()
    assert n<39
    if what is Next.step: assert outcome is fine and not record.in_fp32
    if what is Next.skip and not static: assert outcome is not fine or record.in_fp32

def test_the_next_scale_is_that_of_the_last_attempt_where_nothing_failed():
    assert next_scale([2.**3], [], 1., False)==2.**3 and next_scale([2.**3], [], 1., True)==2.**3

def test_gradients_are_at_fault_where_fp32s_are_far_smaller():
    for norm,what in (30.,(Next.again,8.)),(20.,(Next.diagnose,None)):
        assert what_next(Attempts(kind=Next.reference, suspect_norm=100., norm=norm, finite_scales=[8.]), fine)==what
