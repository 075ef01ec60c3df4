package alerting

import "github.com/prometheus/client_golang/prometheus"

// Metrics are shared by the detector, its feed and the senders of a process.
type Metrics struct {
	Firing     *prometheus.GaugeVec               // alert
	Changes    *prometheus.CounterVec             // alert, type (firing or resolved): stored in the stream
	Dropped    *prometheus.CounterVec             // reason: firing, buckets or tenants, the bound that was reached
	Deliveries *prometheus.CounterVec             // receiver, outcome: delivered, retried, dead, disabled or direct (past a stream that did not take it)
	Lag        prometheus.Gauge                   // seconds; the wiring puts weir_consumer_lag_seconds{consumer="alerting"} here
	Degraded   prometheus.Gauge                   // raised while reports are not read; the wiring puts weir_degraded{part="alerting"} here
	Missing    func(part string) prometheus.Gauge // processes of a part that are not heard of; nil, or the wiring puts weir_degraded{part} here
	Unsent     prometheus.Gauge                   // raised for each receiver that takes nothing; the wiring puts weir_degraded{part="webhook"} here
}

// NewMetrics registers the metrics with reg. Lag, Degraded and Unsent are gauges of their own until the wiring puts the
// shared ones there.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	m := &Metrics{
		Firing: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "weir_alerts_firing",
			Help: "Alerts that are firing now."}, []string{"alert"}),
		Changes: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "weir_alert_changes_total",
			Help: "Alerts that began to fire or were resolved, as stored."}, []string{"alert", "type"}),
		Dropped: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "weir_alert_subjects_dropped_total",
			Help: "What the alerter could not watch or say because a bound was reached: alerts of one kind firing, low buckets, or tenants."}, []string{"reason"}),
		Deliveries: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "weir_alert_deliveries_total",
			Help: "Attempts to hand alerts to on-call, by outcome. dead ones are in the dead-letter stream."}, []string{"receiver", "outcome"}),
		Lag:      prometheus.NewGauge(prometheus.GaugeOpts{Name: "weir_alerting_lag_seconds", Help: "Age of the newest report read."}),
		Degraded: prometheus.NewGauge(prometheus.GaugeOpts{Name: "weir_alerting_degraded", Help: "1 while alerting cannot read reports."}),
		Unsent:   prometheus.NewGauge(prometheus.GaugeOpts{Name: "weir_alerting_unsent", Help: "Receivers that take no alerts."}),
	}
	for _, name := range names {
		m.Firing.WithLabelValues(name)
		m.Changes.WithLabelValues(name, "firing")
		m.Changes.WithLabelValues(name, "resolved")
	}
	for _, reason := range []string{droppedFiring, droppedBucket, droppedTenant} {
		m.Dropped.WithLabelValues(reason)
	}
	reg.MustRegister(m.Firing, m.Changes, m.Dropped, m.Deliveries)
	return m
}

// Reasons of Dropped.
const (
	droppedFiring = "firing"
	droppedBucket = "buckets"
	droppedTenant = "tenants"
)
