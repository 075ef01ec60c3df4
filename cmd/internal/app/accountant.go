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
	accountEvery  = 10 * time.Second // seconds are judged this often
	accountWindow = time.Minute      // against a bucket that was full so long ago
	accountDelay  = 10 * time.Second // after a second, for reports on their way

	// overshootBound is what weir promises: of what was admitted in a minute, no more than this part was too much.
	overshootBound = 0.05
)

// accuracyStore is where what was admitted is read, and the judgement kept.
type accuracyStore interface {
	Admitted(ctx context.Context, from, to time.Time) ([]clickhouse.Admitted, error)
	KeepAccuracy(ctx context.Context, judged []clickhouse.Accuracy) error
}

// accountant measures the promise of one limit for all gateways, in production: what they admitted together, second by
// second, against one bucket.
type accountant struct {
	store  accuracyStore
	alerts *bulletin
	ratio  *prometheus.GaugeVec // weir_overshoot_ratio{rule}
	log    *slog.Logger

	seen map[string]bool // rules that have a ratio
}

func newAccountant(store accuracyStore, js natsjs.JetStream, ratio *prometheus.GaugeVec, log *slog.Logger) *accountant {
	return &accountant{store: store, alerts: newBulletin(js, AlertOvershoot, schemas.SeverityWarning, log), ratio: ratio, log: log, seen: map[string]bool{}}
}

// run accounts until ctx is done.
func (a *accountant) run(ctx context.Context) error {
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

// account judges the newest seconds that are complete, and says what the last minute was like.
func (a *accountant) account(ctx context.Context, now time.Time) error {
	to := now.UTC().Add(-accountDelay).Truncate(accountEvery)
	from := to.Add(-accountWindow)
	admitted, err := a.store.Admitted(ctx, from, to)
	if err != nil {
		return err
	}
	judged := clickhouse.Judge(admitted, from)
	over, all := map[string]float64{}, map[string]float64{}
	var news []clickhouse.Accuracy
	for _, j := range judged {
		over[j.Rule] += j.Over
		all[j.Rule] += j.Taken
		if !j.Time.Before(to.Add(-accountEvery)) {
			news = append(news, j)
		}
	}
	if len(news) > 0 {
		if err := a.store.KeepAccuracy(ctx, news); err != nil {
			return err
		}
	}
	if err := a.alerts.learn(ctx); err != nil {
		return err
	}
	for rule := range all {
		a.seen[rule] = true
	}
	for _, f := range a.alerts.firing {
		a.seen[f.Rule] = true // since before our start, perhaps
	}
	for rule := range a.seen {
		ratio := 0.0
		if all[rule] > 0 {
			ratio = over[rule] / all[rule]
		}
		a.ratio.WithLabelValues(rule).Set(ratio)
		if err := a.say(ctx, rule, ratio, now); err != nil {
			return err
		}
	}
	return nil
}

// say raises the alert of a rule above the bound, and ends it at half of that.
func (a *accountant) say(ctx context.Context, rule string, ratio float64, now time.Time) error {
	key := AlertOvershoot + "/" + rule
	was, fires := a.alerts.firing[key]
	at := now.UTC().Truncate(time.Millisecond)
	switch {
	case !fires && ratio > overshootBound:
		return a.alerts.tell(ctx, schemas.Alert{Type: schemas.AlertFiring, DedupKey: key, Rule: rule, Value: ratio, Threshold: overshootBound, StartsAt: at,
			Summary: fmt.Sprintf("of what was admitted under rule %s in a minute, %.1f %% was above its limits: see the table accuracy", rule, 100*ratio)})
	case fires && ratio <= overshootBound/2:
		was.Type, was.EndsAt, was.Value = schemas.AlertResolved, at, ratio
		was.Summary = fmt.Sprintf("rule %s is kept to again", rule)
		return a.alerts.tell(ctx, was)
	}
	return nil
}
