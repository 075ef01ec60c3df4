package jetstream

import "github.com/prometheus/client_golang/prometheus"

// Metrics are shared by all publishers and readers of a process.
type Metrics struct {
	PublishErrors *prometheus.CounterVec // reason: full, no_stream, disconnected, permission, timeout, too_large, conflict, other
	Lag           *prometheus.GaugeVec   // weir_consumer_lag_seconds{consumer}
	Messages      *prometheus.CounterVec // consumer
	Refused       *prometheus.CounterVec // consumer, reason of the refusal
	Unkept        *prometheus.CounterVec // consumer; refused messages for which the dead-letter stream had no room
	Failures      *prometheus.CounterVec // consumer, reason: handle, fetch, position, dead_letter
	Rebuilt       *prometheus.CounterVec // consumer
	Missing       *prometheus.CounterVec // consumer
	Degraded      prometheus.Gauge       // raised by one for each reader that cannot go on
}

// NewMetrics registers the metrics with reg. Degraded is a gauge of its own until the wiring puts the shared one there.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
	}
	m := &Metrics{
		PublishErrors: counter("weir_report_publish_errors_total", "Attempts to store a usage report that failed. The report is tried again.", "reason"),
		Lag: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "weir_consumer_lag_seconds",
			Help: "Time since the oldest message that is not handled yet arrived in the stream."}, []string{"consumer"}),
		Messages: counter("weir_consumer_messages_total", "Messages handled.", "consumer"),
		Refused:  counter("weir_consumer_refused_total", "Messages that could not be read.", "consumer", "reason"),
		Unkept:   counter("weir_dead_letters_unkept_total", "Messages that could not be read, and for which the dead-letter stream had no room.", "consumer"),
		Failures: counter("weir_consumer_failures_total", "What kept a consumer from going on. It is tried again.", "consumer", "reason"),
		Rebuilt:  counter("weir_consumer_rebuilt_total", "Times that a consumer was made anew because it was gone or out of step.", "consumer"),
		Missing:  counter("weir_consumer_missing_total", "Messages that were gone from the stream before they were handled.", "consumer"),
		Degraded: prometheus.NewGauge(prometheus.GaugeOpts{Name: "weir_degraded", ConstLabels: prometheus.Labels{"part": "consumer"}}),
	}
	for _, r := range reasons {
		m.PublishErrors.WithLabelValues(r)
	}
	reg.MustRegister(m.PublishErrors, m.Lag, m.Messages, m.Refused, m.Unkept, m.Failures, m.Rebuilt, m.Missing)
	return m
}

func (m *Metrics) orPrivate() *Metrics {
	if m == nil {
		return NewMetrics(prometheus.NewRegistry())
	}
	return m
}
