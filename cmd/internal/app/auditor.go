package app

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/weirhq/weir/schemas"
)

// AlertReconciliation is the alert about an hour whose accounts do not agree.
const AlertReconciliation = "reconciliation"

const (
	auditDelay  = 5 * time.Minute // after the end of an hour, for what is on its way
	auditRetry  = time.Minute
	auditPast   = 24 * time.Hour      // closed hours that are looked at each time
	auditOldest = 30 * 24 * time.Hour // an hour that fires is looked at for so long: without its heartbeats it would seem to add up
)

// auditor reconciles the closed hours once an hour, by the gateways' heartbeats, for their journals are out of its reach, and says in the
// alerts' stream which do not add up and which do again.
type auditor struct {
	reconcile func(ctx context.Context, from, to time.Time) (Reconciliation, error)
	alerts    *bulletin
	log       *slog.Logger
}

func newAuditor(js natsjs.JetStream, log *slog.Logger, reconcile func(ctx context.Context, from, to time.Time) (Reconciliation, error)) *auditor {
	return &auditor{reconcile: reconcile, alerts: newBulletin(js, AlertReconciliation, schemas.SeverityCritical, log), log: log}
}

// run audits until ctx is done.
func (a *auditor) run(ctx context.Context) error {
	wait, told := auditRetry, false
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(wait):
		}
		now := time.Now()
		switch err := a.audit(ctx, now); {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			if !told {
				a.log.Warn("usage is not reconciled, trying again until it is", "every", auditRetry, "err", err)
			}
			wait, told = auditRetry, true
		default:
			wait, told = now.Add(-auditDelay).Truncate(time.Hour).Add(time.Hour+auditDelay).Sub(now), false
		}
	}
}

// audit looks at the closed hours, as they are at now.
func (a *auditor) audit(ctx context.Context, now time.Time) error {
	if err := a.alerts.learn(ctx); err != nil {
		return err
	}
	to := now.UTC().Add(-auditDelay).Truncate(time.Hour)
	from := to.Add(-auditPast)
	for _, f := range a.alerts.firing {
		if hour := auditedHour(f.DedupKey); hour.Before(from) && hour.After(now.Add(-auditOldest)) {
			from = hour
		}
	}
	r, err := a.reconcile(ctx, from, to)
	if err != nil {
		return fmt.Errorf("reconcile the hours from %s: %w", from.Format(time.RFC3339), err)
	}
	wrong := map[time.Time][]Difference{}
	for _, d := range r.Differences {
		if hour := d.Hour.UTC(); hour.Before(to) && (d.Between != "redis" || d.Cause != CauseInFlight) {
			wrong[hour] = append(wrong[hour], d)
		}
	}
	for hour := from; hour.Before(to); hour = hour.Add(time.Hour) {
		was, fires := a.alerts.firing[auditKey(hour)]
		all := wrong[hour]
		switch {
		case len(all) > 0 && !fires:
			err = a.alerts.tell(ctx, schemas.Alert{Type: schemas.AlertFiring, DedupKey: auditKey(hour),
				Gateway: all[0].Gateway, Summary: auditSummary(hour, all), Value: auditSize(all), StartsAt: now.UTC().Truncate(time.Millisecond)})
		case len(all) == 0 && fires:
			was.Type, was.EndsAt, was.Value = schemas.AlertResolved, now.UTC().Truncate(time.Millisecond), 0
			was.Summary = fmt.Sprintf("usage of the hour %s adds up", hour.Format(time.RFC3339))
			err = a.alerts.tell(ctx, was)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

const auditPrefix = AlertReconciliation + "/"

func auditKey(hour time.Time) string { return auditPrefix + hour.UTC().Format("2006-01-02T15") }

func auditedHour(key string) time.Time {
	hour, _ := time.Parse(auditPrefix+"2006-01-02T15", key)
	return hour
}

func auditSummary(hour time.Time, all []Difference) string {
	causes := map[string]int{}
	for _, d := range all {
		causes[d.Cause]++
	}
	text := ""
	for _, c := range []string{CauseLost, CauseDoubled, CauseUnclear, CauseHalf, CauseRefused, CauseLate, CauseInFlight} {
		if n := causes[c]; n > 0 {
			text += fmt.Sprintf(", %d %s", n, c)
		}
	}
	return fmt.Sprintf("usage of the hour %s does not add up: %s: see weir history verify --from %s --to %s", hour.Format(time.RFC3339), text[2:],
		hour.Format(time.RFC3339), hour.Add(time.Hour).Format(time.RFC3339))
}

// auditSize is by how many requests and tokens the accounts differ.
func auditSize(all []Difference) (n float64) {
	for _, d := range all {
		n += max(float64(d.Want-d.Have), float64(d.Have-d.Want))
	}
	return n
}
