package aggregator

import "github.com/prometheus/client_golang/prometheus"

// Metrics is what the aggregator counts. Reconciled and Degraded belong to vectors that all parts share: the wiring fills them.
type Metrics struct {
	Reconciled prometheus.Counter // weir_usage_units_total{stage="reconciled"}: requests in folded reports, once more when a batch is delivered again
	Degraded   prometheus.Gauge   // weir_degraded{part="redis"}: 1 while the counter does not answer

	Folds       prometheus.Counter
	FoldSeconds prometheus.Observer
	StatesLost  prometheus.Counter
	Pushes      *prometheus.CounterVec // by kind: change, digest, snapshot
	CastErrors  prometheus.Counter
	Gateways    prometheus.Gauge
	LiveKeys    prometheus.Gauge
	ClockOffset *prometheus.GaugeVec // by gateway
}

// NewMetrics makes the metrics and registers those that belong to the aggregator alone.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	seconds := prometheus.NewHistogram(prometheus.HistogramOpts{Name: "weir_aggregator_fold_seconds",
		Help: "Time to fold one batch of reports into the counter.", Buckets: prometheus.ExponentialBuckets(0.0005, 2, 12)})
	m := &Metrics{
		Reconciled: prometheus.NewCounter(prometheus.CounterOpts{Name: "weir_usage_units_total", ConstLabels: prometheus.Labels{"stage": "reconciled"}}),
		Degraded:   prometheus.NewGauge(prometheus.GaugeOpts{Name: "weir_degraded", ConstLabels: prometheus.Labels{"part": "redis"}}),

		Folds:       prometheus.NewCounter(prometheus.CounterOpts{Name: "weir_aggregator_folds_total", Help: "Keys folded into the counter."}),
		FoldSeconds: seconds,
		StatesLost: prometheus.NewCounter(prometheus.CounterOpts{Name: "weir_aggregator_states_lost_total",
			Help: "Keys whose state in the counter was damaged and made good."}),
		Pushes: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "weir_aggregator_pushes_total",
			Help: "Shares sent to gateways."}, []string{"kind"}),
		CastErrors: prometheus.NewCounter(prometheus.CounterOpts{Name: "weir_aggregator_cast_errors_total",
			Help: "Throttle updates that could not be sent."}),
		Gateways: prometheus.NewGauge(prometheus.GaugeOpts{Name: "weir_aggregator_gateways", Help: "Gateways alive."}),
		LiveKeys: prometheus.NewGauge(prometheus.GaugeOpts{Name: "weir_aggregator_live_keys",
			Help: "Keys of which gateways hold shares."}),
		ClockOffset: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "weir_clock_offset_seconds",
			Help: "The centre's clock less the gateway's, by the gateway's own measurement."}, []string{"gateway"}),
	}
	reg.MustRegister(m.Folds, seconds, m.StatesLost, m.Pushes, m.CastErrors, m.Gateways, m.LiveKeys, m.ClockOffset)
	return m
}
