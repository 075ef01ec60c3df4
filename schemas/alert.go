package schemas

import "time"

// Alert is one change of one alert: it began to fire, got worse, which is told as firing once more, or was resolved. Its JSON is the
// webhook's body and the message on weir.alert.v1.<severity>.
type Alert struct {
	Type      string             `json:"type"`     // weir.alert.firing or weir.alert.resolved
	Name      string             `json:"alert"`    // low-tokens, clock-drift, anomaly, …
	Severity  string             `json:"severity"` // info, warning or critical
	DedupKey  string             `json:"dedup_key"`
	Tenant    string             `json:"tenant,omitempty"`
	Rule      string             `json:"rule,omitempty"`
	Key       string             `json:"key,omitempty"` // of the bucket under Rule
	Gateway   string             `json:"gateway,omitempty"`
	Part      string             `json:"part,omitempty"` // that is missing or does not work: nats, redis, clickhouse, aggregator, …
	Summary   string             `json:"summary"`
	Value     float64            `json:"value"`
	Threshold float64            `json:"threshold"`
	Causes    map[string]float64 `json:"causes,omitempty"` // what Value is made of, by cause, where an alert knows several: lost, doubled, late, …
	StartsAt  time.Time          `json:"starts_at"`
	EndsAt    time.Time          `json:"ends_at,omitzero"` // zero while firing
}

// Types and severities of an Alert.
const (
	AlertFiring   = "weir.alert.firing"
	AlertResolved = "weir.alert.resolved"

	SeverityInfo     = "info"
	SeverityWarning  = "warning"
	SeverityCritical = "critical"
)
