package schemas

import (
	"fmt"
	"strings"
)

// Streams, buckets and subjects. A gateway's name is always the last token of its subjects.
const (
	UsageStream  = "WEIR_USAGE"
	AlertsStream = "WEIR_ALERTS"
	DeadStream   = "WEIR_DLQ"

	UsagePrefix     = "weir.usage.v1."
	ThrottlePrefix  = "weir.throttle.v1."
	SnapshotPrefix  = "weir.snapshot.v1."
	HeartbeatPrefix = "weir.heartbeat.v1."
	HealthPrefix    = "weir.health.v1." // of a part that is no gateway; its name is the last token
	StrictPrefix    = "weir.strict.v1."
	AlertPrefix     = "weir.alert.v1."
	DeadPrefix      = "weir.dlq.v1."
	ClockSubject    = "weir.clock.v1"
)

// maxName bounds gateway and boot names, in bytes.
const maxName = 64

// ValidName reports why name cannot be a subject token of weir: 1 to 64 characters of A-Z, a-z, 0-9, '_' and '-'.
func ValidName(name string) error {
	if name == "" || len(name) > maxName {
		return fmt.Errorf("name %.80q has %d characters, want 1 to %d", name, len(name), maxName)
	}
	for _, c := range []byte(name) {
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', c == '-', c == '_':
		default:
			return fmt.Errorf("name %.80q: only letters, digits, '-' and '_' can stand in a subject", name)
		}
	}
	return nil
}

// Gateway returns the gateway named by a subject under prefix.
func Gateway(prefix, subject string) (string, error) {
	name, ok := strings.CutPrefix(subject, prefix)
	if !ok {
		return "", fmt.Errorf("subject %.120q does not start with %s", subject, prefix)
	}
	if err := ValidName(name); err != nil {
		return "", fmt.Errorf("subject %.120q: %w", subject, err)
	}
	return name, nil
}
