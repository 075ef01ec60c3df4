package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/weirhq/weir/alerting"
	"github.com/weirhq/weir/schemas"
)

// bulletin is where a part of the centre says what it found wrong: alerts of one name in the alerts' stream. What fires is
// what the stream says, and each change names the message that it follows: a restart or a second process tells nothing twice.
type bulletin struct {
	js             natsjs.JetStream
	name, severity string
	log            *slog.Logger

	seq    uint64                   // of the last message known
	firing map[string]schemas.Alert // by dedup key
}

func newBulletin(js natsjs.JetStream, name, severity string, log *slog.Logger) *bulletin {
	return &bulletin{js: js, name: name, severity: severity, log: log, firing: map[string]schemas.Alert{}}
}

// learn reads what the stream says since we last looked.
func (b *bulletin) learn(ctx context.Context) error {
	const doing = "read " + schemas.AlertsStream
	stream, err := b.js.Stream(ctx, schemas.AlertsStream)
	if err != nil {
		return fmt.Errorf("%s: %w", doing, err)
	}
	last := stream.CachedInfo().State.LastSeq
	if last < b.seq { // another stream of that name
		b.seq, b.firing = 0, map[string]schemas.Alert{}
	}
	for b.seq < last {
		msg, err := stream.GetMsg(ctx, b.seq+1, natsjs.WithGetMsgSubject(schemas.AlertPrefix+b.severity))
		if errors.Is(err, natsjs.ErrMsgNotFound) {
			b.seq = last
			break
		}
		if err != nil {
			return fmt.Errorf("%s: %w", doing, err)
		}
		b.seq = msg.Sequence
		switch alert, err := schemas.DecodeAlert(msg.Data); {
		case err != nil || alert.Name != b.name: // somebody else's
		case alert.Type == schemas.AlertFiring:
			b.firing[alert.DedupKey] = *alert
		default:
			delete(b.firing, alert.DedupKey)
		}
	}
	return nil
}

// tell stores a change, unless the stream has a message that we do not know. An alert that fires already, and is told again, is news under
// an id of its own: on-call drops what it has had.
func (b *bulletin) tell(ctx context.Context, alert schemas.Alert) error {
	alert.Name, alert.Severity = b.name, b.severity
	body, err := schemas.EncodeAlert(&alert)
	if err != nil {
		return fmt.Errorf("store alert %s: %w", alert.DedupKey, err)
	}
	id := alerting.MessageID(&alert)
	if _, fires := b.firing[alert.DedupKey]; fires && alert.Type == schemas.AlertFiring {
		id = fmt.Sprintf("%s-%d", id, b.seq)
	}
	msg := &nats.Msg{Subject: schemas.AlertPrefix + alert.Severity, Data: body, Header: nats.Header{"Content-Type": {schemas.ContentJSON}}}
	ack, err := b.js.PublishMsg(ctx, msg, natsjs.WithMsgID(id), natsjs.WithExpectLastSequence(b.seq))
	if err != nil {
		return fmt.Errorf("store alert %s: %w", alert.DedupKey, err)
	}
	b.seq = ack.Sequence
	level := slog.LevelWarn
	if alert.Type == schemas.AlertFiring {
		b.firing[alert.DedupKey] = alert
	} else {
		level = slog.LevelInfo
		delete(b.firing, alert.DedupKey)
	}
	b.log.Log(ctx, level, "alert "+alert.Name, "type", alert.Type, "summary", alert.Summary)
	return nil
}
