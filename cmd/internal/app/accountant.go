package app

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/weirhq/weir/aggregator/clickhouse"
	"github.com/weirhq/weir/schemas"
)

// AlertOvershoot is the alert about a rule that all gateways together did not keep to.
const AlertOvershoot = "overshoot"

const (
	accountEvery  = 10 * time.Second
	accountWindow = 5 * time.Minute  // that the ratio is of
	accountDelay  = 10 * time.Second // from its end to now, for reports on their way

	// overshootBound is what weir promises: of what was admitted in the window, no more than this part was too much.
	overshootBound = 0.05
	// overshootMinutes is in how many minutes of the window something must have been: a crowd that is repaid lasts seconds,
	// and is in two at most.
	overshootMinutes = 3
)

// accuracyStore is where what was admitted is held against the limits, and the judgement kept.
type accuracyStore interface {
	Judged(ctx context.Context, now time.Time) (time.Time, error)
	Judge(ctx context.Context, seen time.Time) (time.Time, error)
	Overshoots(ctx context.Context, from, to time.Time) ([]clickhouse.Overshoot, error)
}

// accountant measures the promise of one limit for all gateways, in production: what they admitted together, second by
// second, against one bucket.
type accountant struct {
	store  accuracyStore
	alerts *bulletin
	ratio  *prometheus.GaugeVec // weir_overshoot_ratio{rule}
	log    *slog.Logger

	judged time.Time       // what arrived before is judged; zero until the store was asked
	seen   map[string]bool // rules that have a ratio
}

func newAccountant(store accuracyStore, js natsjs.JetStream, ratio *prometheus.GaugeVec, log *slog.Logger) *accountant {
	return &accountant{store: store, alerts: newBulletin(js, AlertOvershoot, schemas.SeverityWarning, log), ratio: ratio, log: log, seen: map[string]bool{}}
}

// run accounts until ctx is done.
func (a *accountant) run(ctx context.Context) error {
	a.judged = time.Time{} // another process may have judged since we last did
	t := time.NewTicker(accountEvery)
	defer t.Stop()
	failing := false
	for {
		select {
		case <-ctx.Done():
			return nil
		case now := <-t.C:
			err := a.account(ctx, now)
			if err != nil && !failing && ctx.Err() == nil {
				a.log.Warn("accuracy is not measured, trying again until it is", "every", accountEvery, "err", err)
			}
			failing = err != nil
		}
	}
}

// account judges all that has arrived by now and was not judged, and says what the last minutes were like; those that it
// catches up with too, so that what went wrong while nobody looked is told late, and not never.
func (a *accountant) account(ctx context.Context, now time.Time) error {
	if a.judged.IsZero() {
		at, err := a.store.Judged(ctx, now)
		if err != nil {
			return err
		}
		a.judged = at
	}
	end := now.Add(-accountDelay)
	told := a.judged
	for {
		upto, err := a.store.Judge(ctx, a.judged)
		if err != nil {
			return err
		}
		if upto.Equal(a.judged) {
			return a.tell(ctx, end, now)
		}
		a.judged = upto
		if past := upto.Add(-accountDelay); past.Sub(told) >= time.Minute && end.Sub(past) >= time.Minute {
			if err := a.tell(ctx, past, now); err != nil {
				return err
			}
			told = past
		}
	}
}

// tell says what the minutes before end were like.
func (a *accountant) tell(ctx context.Context, end, now time.Time) error {
	end = end.UTC().Truncate(time.Second)
	all, err := a.store.Overshoots(ctx, end.Add(-accountWindow), end)
	if err != nil {
		return err
	}
	if err := a.alerts.learn(ctx); err != nil {
		return err
	}
	rules := map[string]clickhouse.Overshoot{}
	for _, o := range all {
		rules[o.Rule] = o
		a.seen[o.Rule] = true
	}
	for _, f := range a.alerts.firing {
		a.seen[f.Rule] = true // since before our start, perhaps
	}
	for rule := range a.seen {
		o, ratio := rules[rule], 0.0
		if o.Admitted > 0 {
			ratio = o.Over / o.Admitted
		}
		a.ratio.WithLabelValues(rule).Set(ratio)
		if err := a.say(ctx, rule, ratio, o.Minutes, now); err != nil {
			return err
		}
	}
	return nil
}

// say raises the alert of a rule that was above the bound and for how long it must have been, and ends it at half of the bound.
func (a *accountant) say(ctx context.Context, rule string, ratio float64, minutes int, now time.Time) error {
	key := AlertOvershoot + "/" + rule
	was, fires := a.alerts.firing[key]
	at := now.UTC().Truncate(time.Millisecond)
	switch {
	case !fires && ratio > overshootBound && minutes >= overshootMinutes:
		return a.alerts.tell(ctx, schemas.Alert{Type: schemas.AlertFiring, DedupKey: key, Rule: rule, Value: ratio, Threshold: overshootBound, StartsAt: at,
			Summary: fmt.Sprintf("of what was admitted under rule %s in five minutes, %.1f %% was above its limits: see the table accuracy", rule, 100*ratio)})
	case fires && ratio <= overshootBound/2:
		was.Type, was.EndsAt, was.Value = schemas.AlertResolved, at, ratio
		was.Summary = fmt.Sprintf("rule %s is kept to again", rule)
		return a.alerts.tell(ctx, was)
	}
	return nil
}
