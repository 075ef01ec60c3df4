package app

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/weirhq/weir/aggregator"
	"github.com/weirhq/weir/aggregator/clickhouse"
	"github.com/weirhq/weir/aggregator/redis"
	"github.com/weirhq/weir/ingest/jetstream"
	"github.com/weirhq/weir/ingest/spool"
	"github.com/weirhq/weir/schemas"
)

// Causes of a Difference.
const (
	CauseInFlight = "in flight"              // it is in the stream, or reports come in just now: it will be there
	CauseLate     = "late"                   // a gateway has it and has not published it
	CauseRefused  = "refused"                // it is a dead letter, whatever its reason: see weir dlq
	CauseLost     = "lost"                   // nobody has it
	CauseDoubled  = "doubled"                // it is there more than once
	CauseHalf     = "doubled or half stored" // rows whose report is not stored
	CauseUnclear  = "lost or doubled"        // a roll-up has more than the ledger: one of them is wrong
)

// Difference is where two accounts of the same requests do not agree.
type Difference struct {
	Between string    `json:"between"` // which accounts: "journals", "reports", "usage", "tokens", "redis", or a roll-up
	Cause   string    `json:"cause"`
	Gateway string    `json:"gateway,omitempty"`
	Boot    string    `json:"boot,omitempty"`
	Rule    string    `json:"rule,omitempty"`
	Key     string    `json:"key,omitempty"` // of the bucket, or the tenant
	Hour    time.Time `json:"hour"`
	Want    int64     `json:"want"` // requests, or tokens of a bucket; of a roll-up tokens where the requests are the same
	Have    int64     `json:"have"`
	Detail  string    `json:"detail,omitempty"`
}

// Reconciliation is the verdict about a time.
type Reconciliation struct {
	From        time.Time    `json:"from"`
	To          time.Time    `json:"to"`
	Equal       bool         `json:"equal"`
	Requests    int64        `json:"requests"`            // by the ledger, which is what is compared
	Corrected   int64        `json:"corrected,omitempty"` // that corrections add to these, or take away
	Counts      int          `json:"counts"`              // cumulative counts that Redis and ClickHouse both hold
	Journals    int          `json:"journals"`            // that were read
	Differences []Difference `json:"differences"`
	Unseen      []string     `json:"unseen,omitempty"` // what there was nothing to compare with: "redis", "journals"
	Killed      []Untold     `json:"killed,omitempty"`
}

// Untold is no difference, for nothing of it was ever told to Redis: a process ended, killed or with nowhere to keep it, before it had
// sealed all that it counted. These requests are in the ledger, for the next process sealed them, but the tokens that its buckets gave
// after their last report are in none. They are at most Tokens of all
// buckets that these requests took from under one rule.
type Untold struct {
	Gateway string    `json:"gateway"`
	Boot    string    `json:"boot"`
	Hour    time.Time `json:"hour"` // of the first of these requests
	Tenants uint64    `json:"tenants"`
	Tokens  uint64    `json:"tokens"`
}

// Journal is what a gateway keeps of its own: the reports that it has not been told are stored, and what it could not read of them.
type Journal struct{ gateway, dir string }

// Journals are those of the gateways whose state is under data, a gateway's --data folder.
func Journals(data string) ([]Journal, error) {
	dirs, err := filepath.Glob(spoolDir(data, "*"))
	if err != nil {
		return nil, fmt.Errorf("look for journals: %w", err)
	}
	if len(dirs) == 0 {
		return nil, errors.New("it holds no journal of a gateway, want a gateway's --data folder")
	}
	var all []Journal
	for _, dir := range dirs {
		all = append(all, Journal{filepath.Base(filepath.Dir(dir)), dir})
	}
	return all, nil
}

// Books are the accounts that are compared. Journals may be none: then a report that only its gateway has counts as lost, unless that
// one is alive.
type Books struct {
	NATS     *nats.Conn
	Counter  *redis.Counter
	Store    *clickhouse.Store
	Journals []Journal
}

// maxWaiting bounds the reports and counts that are looked at one by one.
const maxWaiting = 100_000

// Reconcile compares the accounts of the hours that lie in from <= t < to: what the gateways' heartbeats told that they have sealed,
// their journals, the stream, the reports and their usage, the cumulative counts in Redis and in ClickHouse, and the roll-ups.
func Reconcile(ctx context.Context, b Books, from, to time.Time) (Reconciliation, error) {
	r := Reconciliation{From: from.UTC(), To: to.UTC(), Journals: len(b.Journals), Differences: []Difference{}}
	if _, _, err := b.Counter.About(ctx); err != nil { // it might not be asked anything, and "equal" would then be half a truth
		return r, err
	}
	total, err := b.Store.Totals(ctx, from, to)
	if err != nil {
		return r, err
	}
	r.Requests, r.Corrected = total.Requests-total.Corrected, total.Corrected
	known, err := b.outside(ctx, r.From, r.To)
	if err != nil {
		return r, err
	}
	for _, compare := range []func(context.Context, *Reconciliation, *outside) error{b.journals, b.reports, b.usage, b.tokens, b.redis, b.rollups} {
		if err := compare(ctx, &r, known); err != nil {
			return r, err
		}
	}
	unsealed, err := b.Store.Unsealed(ctx, from, to)
	if err != nil {
		return r, err
	}
	for _, u := range unsealed {
		r.Killed = append(r.Killed, Untold{u.Gateway, u.Boot, u.Hour, u.Tenants, u.Cost})
	}
	slices.SortStableFunc(r.Differences, func(a, b Difference) int {
		return cmp.Or(a.Hour.Compare(b.Hour), cmp.Compare(a.Gateway, b.Gateway), cmp.Compare(a.Boot, b.Boot))
	})
	r.Equal = len(r.Differences) == 0
	if r.Counts == 0 {
		r.Unseen = append(r.Unseen, "redis")
	}
	if r.Journals == 0 {
		r.Unseen = append(r.Unseen, "journals")
	}
	if known.unread > 0 {
		r.Unseen = append(r.Unseen, fmt.Sprintf("the last %d dead letters", known.unread))
	}
	return r, nil
}

// unstored is a report that exists outside of the history.
type unstored struct {
	cause    string
	detail   string
	requests map[time.Time]int64 // in the time that is looked at, by hour; 0 when it is unknown how many
	vague    bool                // its contents are unknown
}

// copyOf names a report and what is in it: there may be several of one name, of which one at most is stored.
type copyOf struct {
	clickhouse.ReportID
	clickhouse.Contents
}

// life is one boot of a gateway.
type life struct{ gateway, boot string }

// outside is all that exists outside of the history.
type outside struct {
	at       time.Time // when it was looked for
	reports  map[copyOf]unstored
	causes   map[life]string     // why reports of a boot are not stored
	seqs     map[life][]uint64   // of those reports, in order, each once
	tails    []clickhouse.Tail   // that were told of since the time that is looked at began
	nameless map[string]int      // dead letters that do not say which report they are, by gateway
	letters  map[nameless]*count // those that arrived in the time that is looked at
	unread   uint64              // dead letters that were too many to be looked at
}

// nameless is what is known of dead letters that do not say which report they are.
type nameless struct {
	hour            time.Time
	gateway, reason string
}

type count struct {
	letters, uncounted int
	requests           int64
}

// causeOf is why reports of a boot are not stored, as far as one of them is known to be elsewhere; else what it is otherwise.
func (o *outside) causeOf(gateway, boot, otherwise string) string {
	if cause, ok := o.causes[life{gateway, boot}]; ok {
		return cause
	}
	return otherwise
}

// among is how many reports of a boot are elsewhere, of those numbered first to last.
func (o *outside) among(l life, first, last uint64) (n uint64) {
	for _, seq := range o.seqs[l] {
		if first <= seq && seq <= last {
			n++
		}
	}
	return n
}

// nowhere is how many reports of a tail are not known to be elsewhere.
func (o *outside) nowhere(t clickhouse.Tail) uint64 {
	return t.Last - t.First + 1 - o.among(life{t.Gateway, t.Boot}, t.First, t.Last)
}

// outside finds the reports that wait in the stream, in journals and among the dead letters, or that heartbeats told of, and are not
// stored.
func (b Books) outside(ctx context.Context, from, to time.Time) (*outside, error) {
	o := &outside{at: time.Now(), reports: map[copyOf]unstored{}, causes: map[life]string{}, seqs: map[life][]uint64{}, nameless: map[string]int{}, letters: map[nameless]*count{}}
	within := func(at time.Time) bool { return !at.Before(from) && at.Before(to) }
	note := func(cause, detail string, r *schemas.Report) {
		requests := map[time.Time]int64{}
		for i := range r.Usage {
			if u := &r.Usage[i]; within(u.Time) {
				hour := u.Time.UTC().Truncate(time.Hour)
				requests[hour] = sum(requests[hour], u.Allowed+u.Rejected)
			}
		}
		id := copyOf{clickhouse.ReportID{Gateway: r.Gateway, Boot: r.Boot, Seq: r.Seq}, clickhouse.ContentsOf(r)}
		o.reports[id] = unstored{cause: cause, detail: fmt.Sprintf("report %d", r.Seq) + detail, requests: requests}
	}
	for i, journal := range b.Journals {
		reports, err := spool.Read(journal.dir, journal.gateway)
		if err != nil {
			return nil, fmt.Errorf("read journal %d: %w", i+1, err)
		}
		for _, r := range reports {
			note(CauseLate, "", r)
		}
	}
	letters, err := jetstream.NewDeadLetters(b.NATS)
	if err != nil {
		return nil, err
	}
	o.unread, err = letters.Each(ctx, maxWaiting, func(l *jetstream.DeadLetter) {
		if !strings.HasPrefix(l.Subject, schemas.UsagePrefix) { // an alert, for example
			return
		}
		if r, err := l.Report(); err == nil {
			note(CauseRefused, fmt.Sprintf(": dead letter %d, %s", l.ID, l.Reason), r)
			return
		}
		o.claim(l, within)
	})
	if err != nil {
		return nil, err
	}
	waiting, err := jetstream.Waiting(ctx, b.NATS, historyConsumer, maxWaiting, decodeReport)
	if err != nil {
		return nil, err
	}
	for _, w := range waiting {
		note(CauseInFlight, "", w.Value)
	}
	var ids []clickhouse.ReportID
	elsewhere := map[clickhouse.ReportID]bool{} // than in a journal
	for id, u := range o.reports {
		ids = append(ids, id.ReportID)
		elsewhere[id.ReportID] = elsewhere[id.ReportID] || u.cause != CauseLate
	}
	stored, err := b.Store.Stored(ctx, ids)
	if err != nil {
		return nil, err
	}
	for id, u := range o.reports {
		has, ok := stored[id.ReportID]
		switch {
		case u.cause == CauseLate: // a name is enough: a journal's last one may have been growing when it was read
			if ok || elsewhere[id.ReportID] {
				delete(o.reports, id)
			}
		case !ok:
		case !u.vague && has.Same(id.Contents):
			delete(o.reports, id)
		default:
			which := "another one"
			if u.vague {
				which = "one"
			}
			u.detail += "; " + which + " of this name is stored"
			o.reports[id] = u
		}
	}
	for id, u := range o.reports {
		l := life{id.Gateway, id.Boot}
		o.seqs[l] = append(o.seqs[l], id.Seq)
		for _, cause := range []string{CauseInFlight, CauseLate, CauseRefused} { // what ends by itself comes first
			if u.cause == cause || o.causes[l] == cause {
				o.causes[l] = cause
				break
			}
		}
	}
	for l, seqs := range o.seqs {
		slices.Sort(seqs)
		o.seqs[l] = slices.Compact(seqs)
	}
	// Also what was told of later: what Redis has is of no hour.
	if o.tails, err = b.Store.Tails(ctx, from, o.at, o.at.Add(-settling), o.at.Add(-heard)); err != nil {
		return nil, err
	}
	for _, t := range o.tails {
		if l := (life{t.Gateway, t.Boot}); t.Kept && o.causes[l] != CauseInFlight && o.nowhere(t) > 0 {
			o.causes[l] = CauseLate
		}
	}
	return o, nil
}

// claim notes a dead letter that is no report as it should be. Its times may be what is wrong with it: it belongs to the hour in
// which it arrived. It is its subject's gateway's, or nobody's: no letter explains what another gateway has lost.
func (o *outside) claim(l *jetstream.DeadLetter, within func(time.Time) bool) {
	at := l.Arrived.UTC()
	if at.IsZero() {
		at = l.Time
	}
	c := l.Claim()
	if c.Boot != "" && c.Gateway != "" {
		u := unstored{cause: CauseRefused, detail: fmt.Sprintf("report %d: dead letter %d, %s", c.Seq, l.ID, l.Reason), requests: map[time.Time]int64{}}
		if u.vague = !c.Counted; u.vague {
			u.detail += ", it is unknown of how many requests"
		}
		if within(at) && (c.Requests > 0 || !c.Counted) {
			u.requests[at.Truncate(time.Hour)] = 0
			if c.Counted {
				u.requests[at.Truncate(time.Hour)] = int64(c.Requests)
			}
		}
		o.reports[copyOf{clickhouse.ReportID{Gateway: c.Gateway, Boot: c.Boot, Seq: c.Seq}, clickhouse.Contents{Requests: c.Requests}}] = u
		return
	}
	o.nameless[c.Gateway]++
	if !within(at) {
		return
	}
	of := nameless{at.Truncate(time.Hour), c.Gateway, l.Reason}
	n := o.letters[of]
	if n == nil {
		n = &count{}
		o.letters[of] = n
	}
	n.letters++
	if c.Counted {
		n.requests = sum(n.requests, c.Requests)
	} else {
		n.uncounted++
	}
}

// sum is a + b, or the largest number that there is.
func sum(a int64, b uint64) int64 {
	if b > uint64(math.MaxInt64-a) {
		return math.MaxInt64
	}
	return a + int64(b)
}

// journals tells of what gateways had and cannot read. No account says of which hours that was: it is told whichever are looked at, until
// somebody has taken the file away.
func (b Books) journals(_ context.Context, r *Reconciliation, _ *outside) error {
	for i, j := range b.Journals {
		all, err := spool.Damaged(j.dir)
		if err != nil {
			return fmt.Errorf("read journal %d: %w", i+1, err)
		}
		for _, d := range all {
			until := "told until somebody has looked and taken the file away, see docs/operations.md"
			if !d.Aside {
				until = "leave the file to the gateway, whose next start delivers the rest of it"
			}
			r.add(Difference{Between: "journals", Cause: CauseLost, Gateway: j.gateway, Boot: d.Boot, Hour: d.At.Truncate(time.Hour),
				Detail: fmt.Sprintf("%s: %s; %s", d.File, d.What, until)})
		}
	}
	return nil
}

// fewLives of a gateway are told of one by one, where its heartbeats tell of more in one hour.
const fewLives = 10

// reports looks for holes in the numbers of reports, for reports that gateways have told of and that are nowhere, and for reports with
// usage of that time that are elsewhere.
func (b Books) reports(ctx context.Context, r *Reconciliation, known *outside) error {
	missing, err := b.Store.Missing(ctx, r.From, r.To)
	if err != nil {
		return err
	}
	nowhere := func(m clickhouse.MissingReports, cause, detail string) {
		note := func(first, last uint64) {
			if first > last {
				return
			}
			d := Difference{Between: "reports", Cause: cause, Gateway: m.Gateway, Boot: m.Boot, Hour: m.Hour,
				Want: sum(1, last-first), Detail: clickhouse.MissingReports{First: first, Last: last}.String() + detail}
			if n := known.nameless[m.Gateway]; n > 0 {
				d.Detail += fmt.Sprintf(", unless among the %d dead letters of this gateway that do not say which they are", n)
			}
			r.add(d)
		}
		first := m.First
		for _, seq := range known.seqs[life{m.Gateway, m.Boot}] {
			if first <= seq && seq <= m.Last { // which is a report's number, so that seq+1 is one
				note(first, seq-1)
				first = seq + 1
			}
		}
		note(first, m.Last)
	}
	for _, m := range missing {
		nowhere(m, CauseLost, "")
	}
	lives := map[Difference]int{} // by what they have in common
	more := map[Difference]int64{}
	for _, t := range known.tails {
		n := known.nowhere(t)
		if n == 0 || !t.Hour.Before(r.To) {
			continue
		}
		d := Difference{Between: "reports", Cause: CauseLate, Gateway: t.Gateway, Hour: t.Hour, Detail: ", by its heartbeats"}
		if !t.Kept {
			d.Cause, d.Detail = CauseLost, d.Detail+", unless in a spool that was not read"
		}
		if lives[d]++; lives[d] <= fewLives {
			nowhere(t.MissingReports, d.Cause, d.Detail)
		} else {
			more[d] = sum(more[d], n)
		}
	}
	for of, n := range more {
		d := of
		d.Want, d.Detail = n, fmt.Sprintf("reports of %d more lives of this gateway%s", lives[of]-fewLives, of.Detail)
		r.add(d)
	}
	ids := slices.SortedFunc(maps.Keys(known.reports), func(a, b copyOf) int {
		return cmp.Or(cmp.Compare(a.Gateway, b.Gateway), cmp.Compare(a.Boot, b.Boot), cmp.Compare(a.Seq, b.Seq), cmp.Compare(a.Requests, b.Requests), cmp.Compare(a.Digest, b.Digest))
	})
	for _, id := range ids {
		u := known.reports[id]
		for hour, requests := range u.requests {
			r.add(Difference{Between: "reports", Cause: u.cause, Gateway: id.Gateway, Boot: id.Boot, Hour: hour, Want: requests, Detail: u.detail})
		}
	}
	for of, n := range known.letters {
		d := Difference{Between: "reports", Cause: CauseRefused, Gateway: of.gateway, Hour: of.hour, Want: n.requests,
			Detail: fmt.Sprintf("%d dead letters, %s, that do not say which reports they are", n.letters, of.reason)}
		if n.uncounted > 0 {
			d.Detail += fmt.Sprintf(", %d of them not of how many requests", n.uncounted)
		}
		r.add(d)
	}
	return nil
}

// usage compares the rows of each report with what it says of itself, and looks for rows that no report tells of.
func (b Books) usage(ctx context.Context, r *Reconciliation, known *outside) error {
	uneven, err := b.Store.UnevenReports(ctx, r.From, r.To)
	if err != nil {
		return err
	}
	for _, u := range uneven {
		r.uneven("usage", u, CauseLost)
	}
	orphans, err := b.Store.Orphans(ctx, r.From, r.To)
	if err != nil {
		return err
	}
	for _, o := range orphans {
		cause := CauseHalf
		switch {
		case time.Since(o.Latest) < settling: // its report may be on its way
			cause = CauseInFlight
		case known.among(life{o.Gateway, o.Boot}, o.First, o.Last) >= o.Reports: // they wait to be stored whole
			cause = known.causeOf(o.Gateway, o.Boot, CauseHalf)
		}
		r.add(Difference{Between: "usage", Cause: cause, Gateway: o.Gateway, Boot: o.Boot, Hour: o.Hour, Have: int64(o.Requests),
			Detail: fmt.Sprintf("rows of %d reports that are not stored", o.Reports)})
	}
	return nil
}

// tokens compares what was taken with the growth of cumulative counts.
func (b Books) tokens(ctx context.Context, r *Reconciliation, known *outside) error {
	uneven, err := b.Store.UnevenTokens(ctx, r.From, r.To)
	if err != nil {
		return err
	}
	for _, u := range uneven {
		r.uneven("tokens", u, known.causeOf(u.Gateway, u.Boot, CauseLost))
	}
	return nil
}

// settling is how long after a report Redis and ClickHouse may be apart, and a heartbeat ahead of ClickHouse.
const settling = 10 * time.Second

// heard is how long a gateway counts as alive after a heartbeat.
const heard = time.Minute

// redis compares the cumulative counts that both hold. Redis forgets buckets that have long been full.
func (b Books) redis(ctx context.Context, r *Reconciliation, known *outside) error {
	marks, err := b.Store.Marks(ctx, r.From, r.To, maxWaiting)
	if err != nil {
		return err
	}
	seen := map[aggregator.Key]bool{}
	var keys []aggregator.Key
	for _, m := range marks {
		if k := (aggregator.Key{Rule: m.Rule, Key: m.Key}); !seen[k] {
			seen[k] = true
			keys = append(keys, k)
		}
	}
	cums, err := b.Counter.Cums(ctx, keys)
	if err != nil {
		return err
	}
	for _, m := range marks {
		cum, ok := cums[redis.Incarnation{Key: aggregator.Key{Rule: m.Rule, Key: m.Key}, Gateway: m.Gateway, Boot: m.Boot, Incarnation: m.Incarnation}]
		if !ok {
			continue
		}
		r.Counts++
		if cum == m.Cum {
			continue
		}
		cause := known.causeOf(m.Gateway, m.Boot, CauseLost)
		if time.Since(m.At) < settling || cause == CauseLate { // what Redis has of it was in the stream
			cause = CauseInFlight
		}
		r.add(Difference{Between: "redis", Cause: cause, Gateway: m.Gateway, Boot: m.Boot, Rule: m.Rule, Key: m.Key, Hour: m.At.Truncate(time.Hour),
			Want: int64(max(cum, m.Cum)), Have: int64(min(cum, m.Cum)), Detail: fmt.Sprintf("Redis has %d and ClickHouse %d", cum, m.Cum)})
	}
	return nil
}

// rollups compares them with the ledger.
func (b Books) rollups(ctx context.Context, r *Reconciliation, known *outside) error {
	gaps, err := b.Store.Gaps(ctx, r.From, r.To)
	if err != nil {
		return err
	}
	for _, g := range gaps {
		cause, detail := CauseLost, "the roll-up lacks it: weir history rebuild makes them equal"
		if g.Allowed < 0 || g.Rejected < 0 || g.Cost < 0 { // a rebuild would make the roll-up forget what the ledger may have lost
			cause, detail = CauseUnclear, "lost from the ledger, or doubled in the roll-up: find out which before anything is rebuilt; where all roll-ups have it, it was there"
		}
		r.add(Difference{Between: g.Rollup, Cause: cause, Key: g.Tenant, Rule: g.Rule, Hour: g.Time.Truncate(time.Hour), Want: cmp.Or(g.Allowed+g.Rejected, g.Allowed, g.Cost),
			Detail: fmt.Sprintf("%s, route %s, the ledger less the roll-up (allowed %+d, rejected %+d, cost %+d): %s", g.Time.Format(time.RFC3339), g.Route, g.Allowed, g.Rejected, g.Cost, detail)})
	}
	return nil
}

func (r *Reconciliation) uneven(between string, u clickhouse.Uneven, lost string) {
	cause := lost
	if u.Have > u.Want {
		cause = CauseDoubled
	}
	r.add(Difference{Between: between, Cause: cause, Gateway: u.Gateway, Boot: u.Boot, Rule: u.Rule, Key: u.Key, Hour: u.Hour, Want: u.Want, Have: u.Have})
}

func (r *Reconciliation) add(d Difference) { r.Differences = append(r.Differences, d) }
