package app

import (
	"strings"
	"testing"
)

// TestMetricsOfTheContract has every name that operators' dashboards hold on to, once.
func TestMetricsOfTheContract(t *testing.T) {
	m := NewMetrics()
	m.shared.Policy(1, true)
	m.guard.Decisions.WithLabelValues("guard", "guard", "refused")
	m.guard.Remaining.WithLabelValues("guard")
	m.overshoot.WithLabelValues("contract")
	m.streams.Lag.WithLabelValues(historyConsumer)
	m.aggregator.ClockOffset.WithLabelValues("gateway-1")
	m.alerting.Firing.WithLabelValues("anomaly")
	families, err := m.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	labels := map[string]string{}
	for _, f := range families {
		var names []string
		for _, l := range f.GetMetric()[0].GetLabel() {
			names = append(names, l.GetName())
			for _, forbidden := range []string{"tenant", "key", "ip"} {
				if l.GetName() == forbidden {
					t.Errorf("%s has the label %s", f.GetName(), forbidden)
				}
			}
		}
		labels[f.GetName()] = strings.Join(names, ",")
	}
	for name, want := range map[string]string{
		"weir_decisions_total": "decision,layer,rule", "weir_decision_seconds": "", "weir_tokens_remaining_ratio": "rule", "weir_upstream_errors_total": "reason", "weir_strict_fallback_total": "",
		"weir_usage_units_total": "stage", "weir_degraded": "part", "weir_clock_offset_seconds": "gateway",
		"weir_consumer_lag_seconds": "consumer", "weir_alerts_firing": "alert", "weir_policy_version": "", "weir_build_info": "go,version",
		"weir_overshoot_ratio": "rule",
	} {
		if got, ok := labels[name]; !ok || got != want {
			t.Errorf("metric %s has labels %q (there: %v), want %q", name, got, ok, want)
		}
	}
}
