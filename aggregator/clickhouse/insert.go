package clickhouse

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	ch "github.com/ClickHouse/clickhouse-go/v2"
	"github.com/ClickHouse/clickhouse-go/v2/lib/driver"

	"github.com/weirhq/weir/schemas"
)

// maxRows bounds one insert, in rows: with the longest texts that schemas allows it is one block for the server, and a
// block is what a deduplication token names. A larger batch becomes several inserts, cut at the same rows every time. A
// second of usage at full speed is one insert with room to spare: an insert is a part.
const maxRows = 400_000

// reportsAtOnce bounds one question about reports, so that it fits into a URL.
const reportsAtOnce = 500

// table is how rows of type R become columns.
type table[R any] struct {
	name    string
	columns []column[R]
}

type column[R any] struct {
	name, typ string
	values    func([]R) any // a slice of the column's Go type
}

func col[R, V any](name, typ string, of func(*R) V) column[R] {
	return column[R]{name, typ, func(rows []R) any {
		out := make([]V, len(rows))
		for i := range rows {
			out[i] = of(&rows[i])
		}
		return out
	}}
}

// lowCol is a column of few texts. The driver looks each up in a map by an any: one any serves all rows in a row that have
// the same text.
func lowCol[R any](name string, of func(*R) string) column[R] {
	return column[R]{name, low, func(rows []R) any {
		out := make([]any, len(rows))
		var last string
		var boxed any = last
		for i := range rows {
			if v := of(&rows[i]); v != last {
				last, boxed = v, v
			}
			out[i] = boxed
		}
		return out
	}}
}

const (
	instant = "DateTime64(3, 'UTC')"
	low     = "LowCardinality(String)"
)

// entry is one entry of a report with what all entries of it share.
type entry[E any] struct {
	*schemas.Report
	i       uint32
	arrived time.Time
	e       *E
}

var usageTable = table[entry[schemas.Usage]]{"usage", []column[entry[schemas.Usage]]{
	col("ts", instant, func(r *entry[schemas.Usage]) time.Time { return r.e.Time }),
	lowCol("gateway", func(r *entry[schemas.Usage]) string { return r.Gateway }),
	col("boot", "String", func(r *entry[schemas.Usage]) string { return r.Boot }),
	col("seq", "UInt64", func(r *entry[schemas.Usage]) uint64 { return r.Seq }),
	col("entry", "UInt32", func(r *entry[schemas.Usage]) uint32 { return r.i }),
	col("tenant", "String", func(r *entry[schemas.Usage]) string { return r.e.Tenant }),
	lowCol("route", func(r *entry[schemas.Usage]) string { return r.e.Route }),
	lowCol("rule", func(r *entry[schemas.Usage]) string { return r.e.Rule }),
	lowCol("layer", func(r *entry[schemas.Usage]) string { return r.e.Layer }),
	col("allowed", "UInt64", func(r *entry[schemas.Usage]) uint64 { return r.e.Allowed }),
	col("rejected", "UInt64", func(r *entry[schemas.Usage]) uint64 { return r.e.Rejected }),
	col("cost", "UInt64", func(r *entry[schemas.Usage]) uint64 { return r.e.Cost }),
	col("policy_version", "UInt64", func(r *entry[schemas.Usage]) uint64 { return r.PolicyVersion }),
	col("received", instant, func(r *entry[schemas.Usage]) time.Time { return r.arrived }),
}}

var tokensTable = table[entry[schemas.Tokens]]{"tokens", []column[entry[schemas.Tokens]]{
	col("ts", instant, func(r *entry[schemas.Tokens]) time.Time { return plausible(r.SealedAt, r.arrived) }),
	lowCol("gateway", func(r *entry[schemas.Tokens]) string { return r.Gateway }),
	col("boot", "String", func(r *entry[schemas.Tokens]) string { return r.Boot }),
	col("seq", "UInt64", func(r *entry[schemas.Tokens]) uint64 { return r.Seq }),
	col("entry", "UInt32", func(r *entry[schemas.Tokens]) uint32 { return r.i }),
	lowCol("rule", func(r *entry[schemas.Tokens]) string { return r.e.Rule }),
	lowCol("layer", func(r *entry[schemas.Tokens]) string { return r.e.Layer }),
	col("key", "String", func(r *entry[schemas.Tokens]) string { return r.e.Key }),
	col("tenant", "String", func(r *entry[schemas.Tokens]) string { return r.e.Tenant }),
	lowCol("mode", func(r *entry[schemas.Tokens]) string { return r.e.Mode }),
	lowCol("consistency", func(r *entry[schemas.Tokens]) string { return r.e.Consistency }),
	col("rate_nanos", "Int64", func(r *entry[schemas.Tokens]) int64 { return r.e.RateNanos }),
	col("capacity", "Int64", func(r *entry[schemas.Tokens]) int64 { return r.e.Capacity }),
	col("limit_rate_nanos", "Int64", func(r *entry[schemas.Tokens]) int64 { return r.e.LimitRateNanos }),
	col("limit_burst", "Int64", func(r *entry[schemas.Tokens]) int64 { return r.e.LimitBurst }),
	col("taken", "UInt64", func(r *entry[schemas.Tokens]) uint64 { return r.e.Taken }),
	col("refused", "UInt64", func(r *entry[schemas.Tokens]) uint64 { return r.e.Refused }),
	col("cum", "UInt64", func(r *entry[schemas.Tokens]) uint64 { return r.e.Cum }),
	col("incarnation", "UInt32", func(r *entry[schemas.Tokens]) uint32 { return r.e.Incarnation }),
	col("tokens_min", "Int64", func(r *entry[schemas.Tokens]) int64 { return r.e.TokensMin }),
	col("tokens_last", "Int64", func(r *entry[schemas.Tokens]) int64 { return r.e.TokensLast }),
	col("window_ms", "UInt64", func(r *entry[schemas.Tokens]) uint64 { return uint64(r.e.Window.Milliseconds()) }),
	col("received", instant, func(r *entry[schemas.Tokens]) time.Time { return r.arrived }),
}}

var rejectionsTable = table[entry[schemas.Rejection]]{"rejections", []column[entry[schemas.Rejection]]{
	col("ts", instant, func(r *entry[schemas.Rejection]) time.Time { return r.e.Time }),
	lowCol("gateway", func(r *entry[schemas.Rejection]) string { return r.Gateway }),
	col("boot", "String", func(r *entry[schemas.Rejection]) string { return r.Boot }),
	col("seq", "UInt64", func(r *entry[schemas.Rejection]) uint64 { return r.Seq }),
	col("entry", "UInt32", func(r *entry[schemas.Rejection]) uint32 { return r.i }),
	col("tenant", "String", func(r *entry[schemas.Rejection]) string { return r.e.Tenant }),
	lowCol("route", func(r *entry[schemas.Rejection]) string { return r.e.Route }),
	lowCol("rule", func(r *entry[schemas.Rejection]) string { return r.e.Rule }),
	lowCol("layer", func(r *entry[schemas.Rejection]) string { return r.e.Layer }),
	lowCol("method", func(r *entry[schemas.Rejection]) string { return r.e.Method }),
	col("path", "String", func(r *entry[schemas.Rejection]) string { return r.e.Path }),
	col("client", "String", func(r *entry[schemas.Rejection]) string { return r.e.Client }),
	col("retry_after_ms", "Int64", func(r *entry[schemas.Rejection]) int64 { return r.e.RetryAfterMS }),
	col("instance", "String", func(r *entry[schemas.Rejection]) string { return r.e.Instance }),
	col("received", instant, func(r *entry[schemas.Rejection]) time.Time { return r.arrived }),
}}

// stored is a report of a batch.
type stored struct {
	schemas.Delivered[*schemas.Report]
	batch   string
	content uint64
}

var reportsTable = table[stored]{"reports", []column[stored]{
	lowCol("gateway", func(r *stored) string { return r.Value.Gateway }),
	col("boot", "String", func(r *stored) string { return r.Value.Boot }),
	col("seq", "UInt64", func(r *stored) uint64 { return r.Value.Seq }),
	col("batch", "String", func(r *stored) string { return r.batch }),
	col("position", "UInt64", func(r *stored) uint64 { return r.Seq }),
	col("received", instant, func(r *stored) time.Time { return r.Arrived }),
	col("sealed", instant, func(r *stored) time.Time { return plausible(r.Value.SealedAt, time.UnixMilli(0)) }),
	col("requests", "UInt64", func(r *stored) uint64 { return r.Value.Requests() }),
	col("content", "UInt64", func(r *stored) uint64 { return r.content }),
}}

var alertsTable = table[schemas.Delivered[*schemas.Alert]]{"alerts", []column[schemas.Delivered[*schemas.Alert]]{
	col("ts", instant, func(r *schemas.Delivered[*schemas.Alert]) time.Time { return r.Arrived }),
	lowCol("type", func(r *schemas.Delivered[*schemas.Alert]) string { return r.Value.Type }),
	lowCol("alert", func(r *schemas.Delivered[*schemas.Alert]) string { return r.Value.Name }),
	lowCol("severity", func(r *schemas.Delivered[*schemas.Alert]) string { return r.Value.Severity }),
	col("dedup_key", "String", func(r *schemas.Delivered[*schemas.Alert]) string { return r.Value.DedupKey }),
	col("tenant", "String", func(r *schemas.Delivered[*schemas.Alert]) string { return r.Value.Tenant }),
	lowCol("rule", func(r *schemas.Delivered[*schemas.Alert]) string { return r.Value.Rule }),
	lowCol("gateway", func(r *schemas.Delivered[*schemas.Alert]) string { return r.Value.Gateway }),
	col("summary", "String", func(r *schemas.Delivered[*schemas.Alert]) string { return r.Value.Summary }),
	col("value", "Float64", func(r *schemas.Delivered[*schemas.Alert]) float64 { return r.Value.Value }),
	col("threshold", "Float64", func(r *schemas.Delivered[*schemas.Alert]) float64 { return r.Value.Threshold }),
	col("starts_at", instant, func(r *schemas.Delivered[*schemas.Alert]) time.Time { return plausible(r.Value.StartsAt, r.Arrived) }),
	col("ends_at", "Nullable("+instant+")", func(r *schemas.Delivered[*schemas.Alert]) *time.Time {
		if r.Value.EndsAt.IsZero() {
			return nil
		}
		end := plausible(r.Value.EndsAt, r.Arrived)
		return &end
	}),
}}

// plausible is t, or instead when no clock of ours can have said t. A column holds the years 1900 to 2299, a partition is
// a month, and an unchecked time could be any.
func plausible(t, instead time.Time) time.Time {
	if y := t.Year(); y < 1971 || y > 2199 {
		return instead
	}
	return t
}

// token names a range of a stream for ever. Where the range begins in time is part of it: a stream that was made anew
// counts from 1 again, and its first batches must not pass for those of the old one.
func token[T any](b schemas.Batch[T]) string {
	return fmt.Sprintf("%s-%d-%d-%s", b.Stream, b.First, b.Last, strconv.FormatInt(b.Items[0].Arrived.UnixNano(), 36))
}

// reportsToken is token, and which reports there are: a stream that has lost its end is filled with others under the same numbers,
// and the insert of a range that begins with the same message must not pass for the one before the loss.
func reportsToken(b schemas.Batch[*schemas.Report], contents []uint64) string {
	var id []byte
	for i := range b.Items {
		r := b.Items[i].Value
		id = text(text(id, r.Gateway), r.Boot)
		id = binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(id, r.Seq), contents[i])
	}
	return token(b) + "-" + strconv.FormatUint(digest(id), 36)
}

// content stands for what a report says of requests: two reports of one name with different contents are not the same report.
func content(r *schemas.Report) uint64 {
	b := make([]byte, 0, 100*len(r.Usage))
	for i := range r.Usage {
		u := &r.Usage[i]
		b = binary.AppendVarint(b, u.Time.UnixMilli())
		b = text(text(text(text(b, u.Tenant), u.Route), u.Rule), u.Layer)
		b = binary.AppendUvarint(binary.AppendUvarint(binary.AppendUvarint(b, u.Allowed), u.Rejected), u.Cost)
	}
	return digest(b)
}

func text(b []byte, s string) []byte { return append(binary.AppendUvarint(b, uint64(len(s))), s...) }

// digest is never 0, which stands for a report that was stored before there were digests.
func digest(b []byte) uint64 {
	sum := sha256.Sum256(b)
	return max(1, binary.LittleEndian.Uint64(sum[:]))
}

// Reports stores a batch of usage reports: tokens, rejections, usage, and last that the reports are stored. After an
// error any part of it may be stored or not; the same range again makes it whole, and as often as it is repeated every
// request is counted once, in usage and in every roll-up. A report that an earlier batch stored is left out; one that has the
// name of another that is stored is refused.
//
// A report that ClickHouse refuses for good does not hold up the others: they are stored, none of its usage is, and the
// error is a schemas.Refused.
func (s *Store) Reports(ctx context.Context, b schemas.Batch[*schemas.Report]) error {
	if len(b.Items) == 0 {
		return nil
	}
	contents := make([]uint64, len(b.Items))
	for i := range b.Items {
		contents[i] = content(b.Items[i].Value)
	}
	doing := fmt.Sprintf("store reports %d to %d", b.First, b.Last)
	refused, err := s.reports(ctx, reportsToken(b, contents), b.Items, contents)
	s.settled(err)
	if err == nil && len(refused) > 0 {
		return refused
	}
	return s.explain(doing, err)
}

func (s *Store) reports(ctx context.Context, tok string, items []schemas.Delivered[*schemas.Report], contents []uint64) (refused schemas.Refused, err error) {
	reports, refused, whole, err := s.mine(ctx, tok, items, contents)
	if err != nil {
		return nil, err
	}
	duplicates := len(items) - len(reports) - len(refused)
	doubt := !s.certain()
	if !whole {
		for _, put := range putAll {
			var bad schemas.Refused
			if reports, bad, err = put(ctx, s, tok, reports, doubt); err != nil {
				return nil, err
			}
			refused = append(refused, bad...)
		}
		if err := insert(ctx, s, reportsTable, tok, reports); err != nil {
			return nil, err
		}
		if doubt {
			if err := s.putMissingReports(ctx, tok, items, reports); err != nil {
				return nil, err
			}
		}
	}
	if doubt {
		if err := s.mendRollups(ctx, reports); err != nil {
			return nil, err
		}
	}
	var requests uint64
	for i := range reports {
		requests += reports[i].Value.Requests()
	}
	s.count(tok, requests, duplicates)
	return refused, nil
}

// putMissingReports does for the rows of the reports themselves what putMissing does for those of their entries.
func (s *Store) putMissingReports(ctx context.Context, tok string, items []schemas.Delivered[*schemas.Report], reports []stored) error {
	by, err := s.storedBy(ctx, tok, items)
	if err != nil {
		return err
	}
	left := slices.DeleteFunc(slices.Clone(reports), func(r stored) bool { return by[idOf(r.Value)].batch == tok })
	return insert(ctx, s, reportsTable, tok+"-"+rand.Text(), left)
}

// Doubt tells that the next batch may have been tried before, by another process: it is looked for as after a failure.
func (s *Store) Doubt() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sure, s.alerted = false, false
}

// certain says that no attempt was made before at the batch in hand: not after one that failed, after a start, or in doubt.
func (s *Store) certain() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sure
}

type reportID struct {
	gateway, boot string
	seq           uint64
}

func idOf(r *schemas.Report) reportID { return reportID{r.Gateway, r.Boot, r.Seq} }

// mine returns the reports that this batch is to store: each once, without those that another batch stored before.
// Batches of a stream are handled in order, so that this is the same answer every time the batch is done again. whole
// says that an earlier attempt stored them all. Reports that have the name of another one are refused: a gateway that begins
// again under an old boot would otherwise lose them without a word.
func (s *Store) mine(ctx context.Context, tok string, items []schemas.Delivered[*schemas.Report], contents []uint64) (mine []stored, refused schemas.Refused, whole bool, err error) {
	by, err := s.storedBy(ctx, tok, items)
	if err != nil {
		return nil, nil, false, err
	}
	if err := s.recall(ctx, tok, items, by); err != nil {
		return nil, nil, false, err
	}
	mine = make([]stored, 0, len(items))
	seen := make(map[reportID]known, len(items))
	whole = true
	for i, it := range items {
		id, this := idOf(it.Value), known{tok, it.Arrived, Contents{it.Value.Requests(), contents[i]}}
		other, was := seen[id], by[id]
		if other.batch == "" && was.batch != "" && was.batch != tok {
			other = was
		}
		switch {
		case other.batch == "":
			seen[id] = this
			whole = whole && was.batch == tok
			mine = append(mine, stored{it, tok, contents[i]})
		case !other.Same(this.Contents):
			refused = append(refused, schemas.RefusedMessage{Seq: it.Seq, Detail: fmt.Sprintf(
				"report %d of boot %s is stored already, with %d requests, and this is another one, with %d: a gateway needs a new boot with each start",
				id.seq, id.boot, other.Requests, this.Requests)})
		}
	}
	return mine, refused, whole, nil
}

// known is what is known of a report of some name.
type known struct {
	batch    string // that stored it
	received time.Time
	Contents
}

// Contents tell a report from another one of the same name.
type Contents struct {
	Requests uint64
	Digest   uint64 // of its usage; 0 when it is unknown: it was stored before there were digests, for example
}

// ContentsOf are those of a report at hand.
func ContentsOf(r *schemas.Report) Contents { return Contents{r.Requests(), content(r)} }

// Same says whether two reports of one name are the same, as far as is known.
func (c Contents) Same(as Contents) bool {
	return c.Requests == as.Requests && (c.Digest == as.Digest || c.Digest == 0 || as.Digest == 0)
}

// storedBy says which batch stored each report, as far as one did; tok wins over others.
func (s *Store) storedBy(ctx context.Context, tok string, items []schemas.Delivered[*schemas.Report]) (map[reportID]known, error) {
	by := map[reportID]known{}
	for part := range slices.Chunk(items, reportsAtOnce) {
		rows, err := s.conn.Query(ch.Context(ctx, ch.WithParameters(ch.Parameters{"ids": ids(part, func(it *schemas.Delivered[*schemas.Report]) *schemas.Report { return it.Value })})),
			"SELECT gateway, boot, seq, batch, received, requests, content FROM reports WHERE (gateway, boot, seq) IN {ids:Array(Tuple(String, String, UInt64))}")
		if err != nil {
			return nil, err
		}
		var id reportID
		var k known
		for rows.Next() {
			if err := rows.Scan(&id.gateway, &id.boot, &id.seq, &k.batch, &k.received, &k.Requests, &k.Digest); err != nil {
				return nil, errors.Join(err, rows.Close())
			}
			if by[id].batch != tok {
				by[id] = k
			}
		}
		if err := errors.Join(rows.Err(), rows.Close()); err != nil {
			return nil, err
		}
	}
	return by, nil
}

// recallBehind is how long before its arrival the usage of a report is looked for: few are late by more.
const recallBehind = 2 * time.Hour

// recall finds in the ledger what was in reports of other batches that are stored and of which it is not known: reports.content was made
// again, or they are from before there was one. It looks at the time of their namesakes, and at recallBehind before they arrived: what the
// ledger has not all of there stays unknown.
func (s *Store) recall(ctx context.Context, tok string, items []schemas.Delivered[*schemas.Report], by map[reportID]known) error {
	var unknown []stored
	for _, it := range items {
		if k := by[idOf(it.Value)]; k.batch != "" && k.batch != tok && k.Digest == 0 {
			unknown = append(unknown, stored{Delivered: it})
		}
	}
	for part := range slices.Chunk(unknown, reportsAtOnce) {
		from, to, some := span(usageTable, entries(part, func(r *schemas.Report) []schemas.Usage { return r.Usage }))
		if !some {
			continue
		}
		arrived := make([]time.Time, len(part))
		for i := range part {
			arrived[i] = by[idOf(part[i].Value)].received
		}
		first, last := slices.MinFunc(arrived, time.Time.Compare).Add(-recallBehind), slices.MaxFunc(arrived, time.Time.Compare).Add(time.Minute)
		had := map[reportID]*schemas.Report{}
		rows, err := s.conn.Query(ch.Context(ctx, ch.WithParameters(ch.Parameters{"ids": ids(part, func(r *stored) *schemas.Report { return r.Value }), "from": from, "to": to,
			"first": strconv.FormatInt(first.UnixMilli(), 10), "last": strconv.FormatInt(last.UnixMilli(), 10)})),
			"SELECT gateway, boot, seq, ts, tenant, route, rule, layer, allowed, rejected, cost FROM usage FINAL WHERE ("+within+
				" OR ts >= fromUnixTimestamp64Milli({first:Int64}, 'UTC') AND ts < fromUnixTimestamp64Milli({last:Int64}, 'UTC')) AND (gateway, boot, seq) IN {ids:Array(Tuple(String, String, UInt64))} ORDER BY entry"+final)
		if err != nil {
			return err
		}
		var id reportID
		var u schemas.Usage
		for rows.Next() {
			if err := rows.Scan(&id.gateway, &id.boot, &id.seq, &u.Time, &u.Tenant, &u.Route, &u.Rule, &u.Layer, &u.Allowed, &u.Rejected, &u.Cost); err != nil {
				return errors.Join(err, rows.Close())
			}
			if had[id] == nil {
				had[id] = &schemas.Report{}
			}
			had[id].Usage = append(had[id].Usage, u)
		}
		if err := errors.Join(rows.Err(), rows.Close()); err != nil {
			return err
		}
		for id, r := range had {
			if k := by[id]; k.Requests == r.Requests() {
				k.Digest = content(r)
				by[id] = k
			}
		}
	}
	return nil
}

// span is the time of entries, for a condition of within; false when there are none.
func span[E any](t table[entry[E]], all []entry[E]) (from, to string, some bool) {
	times, _ := t.columns[0].values(all).([]time.Time) // of a table of entries: ts
	if len(times) == 0 {
		return "", "", false
	}
	from = strconv.FormatInt(slices.MinFunc(times, time.Time.Compare).UnixMilli(), 10)
	return from, strconv.FormatInt(slices.MaxFunc(times, time.Time.Compare).UnixMilli()+1, 10), true
}

// ids is the names of reports as an array of ClickHouse. They are letters, digits, '-' and '_': schemas saw to it.
func ids[R any](all []R, report func(*R) *schemas.Report) string {
	var b strings.Builder
	for i := range all {
		r := report(&all[i])
		fmt.Fprintf(&b, ",('%s','%s',%d)", r.Gateway, r.Boot, r.Seq)
	}
	return "[" + strings.TrimPrefix(b.String(), ",") + "]"
}

// putAll is how the entries of reports are stored, table by table. Usage feeds the roll-ups, where nothing collapses: it comes after
// all else that may refuse a report. Other tables may hold rows of a report that is not stored in the end; they are the same rows
// when it is replayed.
var putAll = []func(ctx context.Context, s *Store, tok string, reports []stored, doubt bool) (kept []stored, refused schemas.Refused, err error){
	putEntries(tokensTable, func(r *schemas.Report) []schemas.Tokens { return r.Tokens }),
	putEntries(rejectionsTable, func(r *schemas.Report) []schemas.Rejection { return r.Rejections }),
	putEntries(usageTable, func(r *schemas.Report) []schemas.Usage { return r.Usage }),
}

// putEntries is how the entries of reports become rows of t: in inserts of at most maxRows, cut between reports, so that
// an insert that is refused has left nothing of its reports behind. With doubt, it looks whether they are there.
func putEntries[E any](t table[entry[E]], of func(*schemas.Report) []E) func(context.Context, *Store, string, []stored, bool) ([]stored, schemas.Refused, error) {
	return func(ctx context.Context, s *Store, tok string, reports []stored, doubt bool) (kept []stored, refused schemas.Refused, err error) {
		put := func(tok string, reports []stored) error {
			k, bad, err := putReports(ctx, s, t, tok, reports, of)
			kept, refused = append(kept, k...), append(refused, bad...)
			return err
		}
		part, first, rows := tok, 0, 0
		for i := range reports {
			n := len(of(reports[i].Value))
			if rows += n; i == first || rows <= maxRows {
				continue
			}
			if err := put(part, reports[first:i]); err != nil {
				return nil, nil, err
			}
			part, first, rows = fmt.Sprintf("%s-%d", part, reports[i].Seq), i, n
		}
		if err := put(part, reports[first:]); err != nil {
			return nil, nil, err
		}
		if doubt {
			err = putMissing(ctx, s, t, tok, kept, of)
		}
		return kept, refused, err
	}
}

// putMissing stores, under another token, the rows of those of reports that are not in t though they were put under tok. ClickHouse
// writes a token down before the part, so that one that is killed in between knows the token of rows that it does not have, and
// drops them when they come again (TestTokenOfRowsThatAreNotThere).
func putMissing[E any](ctx context.Context, s *Store, t table[entry[E]], tok string, reports []stored, of func(*schemas.Report) []E) error {
	var lost []stored
	for part := range slices.Chunk(reports, reportsAtOnce) {
		from, to, some := span(t, entries(part, of))
		if !some {
			continue
		}
		rows, err := s.conn.Query(ch.Context(ctx, ch.WithParameters(ch.Parameters{"ids": ids(part, func(r *stored) *schemas.Report { return r.Value }),
			"from": from, "to": to})),
			"SELECT gateway, boot, seq, uniqExact(entry) FROM "+t.name+" WHERE "+within+" AND (gateway, boot, seq) IN {ids:Array(Tuple(String, String, UInt64))} GROUP BY gateway, boot, seq")
		if err != nil {
			return err
		}
		have := map[reportID]uint64{}
		var id reportID
		var n uint64
		for rows.Next() {
			if err := rows.Scan(&id.gateway, &id.boot, &id.seq, &n); err != nil {
				return errors.Join(err, rows.Close())
			}
			have[id] = n
		}
		if err := errors.Join(rows.Err(), rows.Close()); err != nil {
			return err
		}
		for _, r := range part {
			if have[idOf(r.Value)] < uint64(len(of(r.Value))) {
				lost = append(lost, r)
			}
		}
	}
	if len(lost) == 0 {
		return nil
	}
	s.log.Error("ClickHouse knows the token of rows that it has not, storing them under another", "table", t.name, "token", tok, "reports", len(lost))
	return insert(ctx, s, t, tok+"-"+rand.Text(), entries(lost, of))
}

func putReports[E any](ctx context.Context, s *Store, t table[entry[E]], tok string, reports []stored, of func(*schemas.Report) []E) ([]stored, schemas.Refused, error) {
	return sift(ctx, tok, reports, func(r *stored) uint64 { return r.Seq }, func(ctx context.Context, tok string, reports []stored) error {
		return insert(ctx, s, t, tok, entries(reports, of))
	})
}

func entries[E any](reports []stored, of func(*schemas.Report) []E) []entry[E] {
	var n int
	for i := range reports {
		n += len(of(reports[i].Value))
	}
	out := make([]entry[E], 0, n)
	for i := range reports {
		r := &reports[i]
		es := of(r.Value)
		for j := range es {
			out = append(out, entry[E]{r.Value, uint32(j), r.Arrived, &es[j]})
		}
	}
	return out
}

// Alerts stores a batch of alerts; the rules of Reports hold. The same change told again is the same row under FINAL: in doubt whether
// a batch was tried before, it is put under another token and not looked for.
func (s *Store) Alerts(ctx context.Context, b schemas.Batch[*schemas.Alert]) error {
	if len(b.Items) == 0 {
		return nil
	}
	tok := token(b)
	s.mu.Lock()
	if !s.alerted {
		tok += "-" + rand.Text()
	}
	s.mu.Unlock()
	_, refused, err := sift(ctx, tok, b.Items, func(a *schemas.Delivered[*schemas.Alert]) uint64 { return a.Seq },
		func(ctx context.Context, tok string, alerts []schemas.Delivered[*schemas.Alert]) error {
			return insert(ctx, s, alertsTable, tok, alerts)
		})
	s.mu.Lock()
	s.alerted = err == nil
	s.mu.Unlock()
	if err == nil && len(refused) > 0 {
		return refused
	}
	return s.explain(fmt.Sprintf("store alerts %d to %d", b.First, b.Last), err)
}

// insert stores rows under a token, or, with token "", as they are. Errors are the driver's.
func insert[R any](ctx context.Context, s *Store, t table[R], token string, rows []R) error {
	names := make([]string, len(t.columns))
	types := make([]ch.ColumnNameAndType, len(t.columns))
	for i, c := range t.columns {
		names[i], types[i] = c.name, ch.ColumnNameAndType{Name: c.name, Type: c.typ}
	}
	sql := "INSERT INTO " + t.name + " (" + strings.Join(names, ", ") + ")"
	n := 0
	for part := range slices.Chunk(rows, maxRows) {
		tok := token
		if n > 0 && token != "" {
			tok += "-" + strconv.Itoa(n)
		}
		n++
		err := s.send(ctx, sql, tok, types, func(b driver.Batch) error {
			for i, c := range t.columns {
				// By the native protocol these are the server's own columns; by HTTP they are ours, and it compares.
				if is := string(b.Columns()[i].Type()); is != c.typ {
					return &Error{Kind: ErrSchema, Err: ErrSchema, Line: fmt.Sprintf("column %s of %s is %s and should be %s: run weir migrate", c.name, t.name, is, c.typ)}
				}
				if err := b.Column(i).Append(c.values(part)); err != nil {
					return &Error{Kind: ErrRefused, Line: fmt.Sprintf("column %s of %s: %s", c.name, t.name, oneLine(err.Error())), Err: err}
				}
			}
			return nil
		})
		if err != nil {
			s.forget()
			return err
		}
	}
	return nil
}

// send makes one insert. A batch of the driver is used once: whether the server has stored it is unknown after an error,
// and only the same rows under the same token, in a new one, are a safe answer.
func (s *Store) send(ctx context.Context, sql, token string, types []ch.ColumnNameAndType, fill func(driver.Batch) error) error {
	ctx, cancel := context.WithTimeout(ctx, insertTimeout)
	defer cancel()
	settings, err := s.settings(ctx, token)
	if err != nil {
		return err
	}
	b, err := s.conn.PrepareBatch(ch.Context(ctx, ch.WithSettings(settings), ch.WithColumnNamesAndTypes(types)), sql)
	if err != nil {
		return err
	}
	if err := fill(b); err != nil {
		return errors.Join(err, b.Abort())
	}
	return b.Send()
}
