package app

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/weirhq/weir/aggregator"
	"github.com/weirhq/weir/aggregator/clickhouse"
	"github.com/weirhq/weir/aggregator/natscast"
	"github.com/weirhq/weir/alerting"
	"github.com/weirhq/weir/enforcer/httpguard"
	"github.com/weirhq/weir/enforcer/natsfeed"
	"github.com/weirhq/weir/ingest"
	"github.com/weirhq/weir/ingest/jetstream"
	"github.com/weirhq/weir/ingest/spool"
	"github.com/weirhq/weir/internal/natsx"
	"github.com/weirhq/weir/internal/obs"
)

// Metrics are all the metrics of one process. Every part of the process counts in the same ones.
type Metrics struct {
	Registry *prometheus.Registry
	shared   *obs.Shared

	nats       *natsx.Metrics
	streams    *jetstream.Metrics
	ingest     *ingest.Metrics
	spool      *spool.Metrics
	guard      *httpguard.Metrics
	feed       *natsfeed.Metrics
	aggregator *aggregator.Metrics
	cast       *natscast.Metrics
	store      *clickhouse.Metrics
	alerting   *alerting.Metrics
	overshoot  *prometheus.GaugeVec
}

// NewMetrics registers everything once, and gives each part its stage of weir_usage_units_total and its part of weir_degraded.
func NewMetrics() *Metrics {
	reg, shared := obs.Registry()
	m := &Metrics{Registry: reg, shared: shared,
		nats: natsx.NewMetrics(reg), streams: jetstream.NewMetrics(reg), ingest: ingest.NewMetrics(reg), spool: spool.NewMetrics(reg),
		guard: httpguard.NewMetrics(reg), feed: natsfeed.NewMetrics(reg), aggregator: aggregator.NewMetrics(reg),
		cast: natscast.NewMetrics(reg), store: clickhouse.NewMetrics(reg), alerting: alerting.NewMetrics(reg),
	}
	m.overshoot = prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "weir_overshoot_ratio",
		Help: "Of what all gateways admitted under a rule in the last five minutes, the part above rate·t + burst and a token for each gateway."}, []string{"rule"})
	reg.MustRegister(m.overshoot)
	m.ingest.Admitted, m.ingest.Spooled, m.ingest.Acked = shared.Units("admitted"), shared.Units("spooled"), shared.Units("acked")
	m.aggregator.Reconciled, m.store.Stored = shared.Units("reconciled"), shared.Units("stored")
	m.nats.Degraded, m.streams.Degraded, m.ingest.Degraded = shared.Degraded("nats"), shared.Degraded("consumer"), shared.Degraded("ingest")
	m.spool.Degraded = shared.Degraded("spool")
	m.feed.Degraded, m.aggregator.Degraded, m.store.Degraded = shared.Degraded("centre"), shared.Degraded("redis"), shared.Degraded("clickhouse")
	m.alerting.Degraded, m.alerting.Unsent, m.alerting.Lag = shared.Degraded("alerting"), shared.Degraded("webhook"), m.streams.Lag.WithLabelValues("alerting")
	m.alerting.Missing = shared.Degraded
	return m
}
