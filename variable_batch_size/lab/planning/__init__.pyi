"""Planning: predict a run before it starts."""

from .figures import plot_plan as plot_plan
from .plan import Plan as Plan
from .profile import Profile as Profile
from .profile import fit_throughput as fit_throughput
from .rental import ByDeadline as ByDeadline
from .rental import Cheapest as Cheapest
from .rental import Prices as Prices
from .rental import WithinBudget as WithinBudget
from .reports import conversion_report as conversion_report
from .reports import plan_report as plan_report
from .reports import trace_report as trace_report
from .simulate import Availability as Availability
from .simulate import NoiseCurve as NoiseCurve
from .simulate import NoiseCurves as NoiseCurves
from .simulate import simulate as simulate
