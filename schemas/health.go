package schemas

import (
	"encoding/json"
	"fmt"
)

// The parts that say how they are.
const (
	PartAggregator = "aggregator"
	PartAlerter    = "alerter"
)

// Health is the sign of life of a part that is no gateway, a few times a second.
type Health struct {
	Part    string   `json:"-"`                // from the subject
	Boot    string   `json:"boot"`             // of this process life
	Without []string `json:"without"`          // what it does without: redis, clickhouse or consumer
	Stopped bool     `json:"stopped,omitzero"` // its last word: it was shut down
}

// EncodeHealth returns h as JSON.
func EncodeHealth(h *Health) ([]byte, error) { return json.Marshal(h) }

// DecodeHealth reads what came on subject.
func DecodeHealth(subject string, b []byte) (*Health, error) {
	part, err := Gateway(HealthPrefix, subject)
	if err != nil {
		return nil, fmt.Errorf("decode health: %w", err)
	}
	h := Health{Part: part}
	if err := json.Unmarshal(b, &h); err != nil {
		return nil, fmt.Errorf("decode health of %s: %w", part, err)
	}
	if err := ValidName(h.Boot); err != nil {
		return nil, fmt.Errorf("decode health of %s: boot: %w", part, err)
	}
	for _, name := range h.Without {
		if err := ValidName(name); err != nil {
			return nil, fmt.Errorf("decode health of %s: %w", part, err)
		}
	}
	return &h, nil
}
