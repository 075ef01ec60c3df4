// Package alerting decides when somebody must be woken: it watches what gateways report for buckets that run dry, clocks
// that are off, traffic that is out of a tenant's ordinary, and gateways that fall silent.
package alerting

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"net/url"
	"strings"
	"time"

	"github.com/weirhq/weir/schemas"
)

// Names of the alerts.
const (
	LowTokens     = "low-tokens"     // a bucket is nearly empty and stays so
	ClockDrift    = "clock-drift"    // a gateway's clock is off, and not just by what the network hides
	Anomaly       = "anomaly"        // a tenant asks for far more than is normal for it
	GatewaySilent = "gateway-silent" // a gateway that was alive is not heard of: the alert about missing data
	Degraded      = "degraded"       // a gateway throttles without the centre, or a part does without something it needs
)

// names are all of them.
var names = []string{LowTokens, ClockDrift, Anomaly, GatewaySilent, Degraded}

// dedupKey names a subject of an alert for ever: the same for each of its episodes, different for any other subject. It
// has at most 255 characters, the most that pagers take.
func dedupKey(a *schemas.Alert) string {
	parts := []string{a.Name}
	switch a.Name {
	case LowTokens:
		parts = append(parts, a.Rule, a.Key)
	case Anomaly:
		parts = append(parts, a.Tenant)
	case Degraded:
		if a.Part != "" {
			parts = append(parts, "part", a.Part)
			break
		}
		parts = append(parts, a.Gateway)
	default:
		parts = append(parts, a.Gateway)
	}
	for i, p := range parts {
		parts[i] = url.PathEscape(p) // so that no part can hold the separator
	}
	key := strings.Join(parts, "/")
	if len(key) > 255 {
		sum := sha256.Sum256([]byte(key))
		key = a.Name + "/sha256-" + hex.EncodeToString(sum[:])
	}
	return key
}

// MessageID names one change of one episode. It is the same whenever and wherever it is computed: the id under which the
// change is stored, and the webhook-id of every attempt to deliver it.
func MessageID(a *schemas.Alert) string {
	sum := sha256.Sum256([]byte(a.DedupKey + "\x00" + a.StartsAt.UTC().Format(time.RFC3339Nano) + "\x00" + a.Type))
	return "msg_" + hex.EncodeToString(sum[:16])
}

// Receiver takes alerts to where people see them. Send is called by one goroutine, with a body that is an alert as JSON;
// the same id comes again when the outcome of an earlier attempt is unknown. It returns nil when the alert was taken. An
// error that is no *DeliveryError is worth another attempt.
type Receiver interface {
	Send(ctx context.Context, id string, body []byte) error
}

// DeliveryError says why an alert was not taken, and what to do about it.
type DeliveryError struct {
	Permanent bool          // the same again would be refused again
	Gone      bool          // the receiver wants no more alerts, ever
	After     time.Duration // the receiver asked not to be tried before; 0 when it did not say
	Err       error
}

func (e *DeliveryError) Error() string { return e.Err.Error() }
func (e *DeliveryError) Unwrap() error { return e.Err }
