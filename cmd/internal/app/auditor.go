package app

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
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
	auditLooks  = 3                   // while reports of closed hours are on their way
)

// auditor reconciles the closed hours once an hour, by the gateways' heartbeats, for their journals are out of its reach, and says in the
// alerts' stream which do not add up, which have got worse, and which add up again.
type auditor struct {
	reconcile func(ctx context.Context, from, to time.Time) (Reconciliation, error)
	alerts    *bulletin
	log       *slog.Logger
	pause     time.Duration // between looks
}

func newAuditor(js natsjs.JetStream, log *slog.Logger, reconcile func(ctx context.Context, from, to time.Time) (Reconciliation, error)) *auditor {
	return &auditor{reconcile: reconcile, alerts: newBulletin(js, AlertReconciliation, schemas.SeverityCritical, log), log: log, pause: settling}
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
	wrong, err := a.wrong(ctx, from, to)
	if err != nil {
		return err
	}
	for hour := from; hour.Before(to); hour = hour.Add(time.Hour) {
		was, fires := a.alerts.firing[auditKey(hour)]
		all := wrong[hour]
		sizes := auditSizes(all)
		switch {
		case len(all) > 0 && (!fires || worse(&was, sizes)):
			began := now.UTC().Truncate(time.Millisecond)
			if fires {
				began = was.StartsAt
			}
			err = a.alerts.tell(ctx, schemas.Alert{Type: schemas.AlertFiring, DedupKey: auditKey(hour),
				Gateway: all[0].Gateway, Summary: auditSummary(hour, all), Value: auditSize(sizes, auditCauses), Causes: sizes, StartsAt: began})
		case len(all) == 0 && fires:
			was.Type, was.EndsAt, was.Value, was.Causes = schemas.AlertResolved, now.UTC().Truncate(time.Millisecond), 0, nil
			was.Summary = fmt.Sprintf("usage of the hour %s adds up", hour.Format(time.RFC3339))
			err = a.alerts.tell(ctx, was)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// wrong is what differs, by closed hour. What is on its way has time to arrive: a gateway that comes back may bring old hours just now.
func (a *auditor) wrong(ctx context.Context, from, to time.Time) (map[time.Time][]Difference, error) {
	for look := 1; ; look++ {
		r, err := a.reconcile(ctx, from, to)
		if err != nil {
			return nil, fmt.Errorf("reconcile the hours from %s: %w", from.Format(time.RFC3339), err)
		}
		wrong, moving := map[time.Time][]Difference{}, false
		for _, d := range r.Differences {
			if hour := d.Hour.UTC(); hour.Before(to) && (d.Between != "redis" || d.Cause != CauseInFlight) {
				wrong[hour] = append(wrong[hour], d)
				moving = moving || d.Cause == CauseInFlight
			}
		}
		if !moving || look == auditLooks {
			return wrong, nil
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(a.pause):
		}
	}
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
	for _, c := range auditCauses {
		if n := causes[c]; n > 0 {
			text += fmt.Sprintf(", %d %s", n, c)
		}
	}
	return fmt.Sprintf("usage of the hour %s does not add up: %s: see weir history verify --from %s --to %s", hour.Format(time.RFC3339), text[2:],
		hour.Format(time.RFC3339), hour.Add(time.Hour).Format(time.RFC3339))
}

// auditStays are the causes that do not end by themselves, and auditCauses are all.
var (
	auditStays  = []string{CauseLost, CauseDoubled, CauseUnclear, CauseHalf, CauseRefused}
	auditCauses = append(slices.Clone(auditStays), CauseLate, CauseInFlight)
)

// auditSizes is by how many requests and tokens the accounts differ, by cause. A difference of unknown size counts as 1.
func auditSizes(all []Difference) map[string]float64 {
	sizes := map[string]int64{}
	for _, d := range all {
		sizes[d.Cause] = sum(sizes[d.Cause], uint64(max(d.Want-d.Have, d.Have-d.Want, 1)))
	}
	out := map[string]float64{}
	for c, n := range sizes {
		out[c] = float64(n)
	}
	return out
}

func auditSize(sizes map[string]float64, of []string) (n float64) {
	for _, c := range of {
		n += sizes[c]
	}
	return n
}

// worse says whether there is more of a cause that stays than was told, or more in all that is not in the stream already. What was late
// and is lost is worse; what was lost, or late, and comes in after all is not.
func worse(was *schemas.Alert, sizes map[string]float64) bool {
	notInFlight := auditCauses[:len(auditCauses)-1]
	now := auditSize(sizes, notInFlight)
	if was.Causes == nil { // told by an older weir
		return now > was.Value
	}
	return now > auditSize(was.Causes, notInFlight) || slices.ContainsFunc(auditStays, func(c string) bool { return sizes[c] > was.Causes[c] })
}
