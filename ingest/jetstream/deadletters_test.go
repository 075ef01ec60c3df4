package jetstream

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/weirhq/weir/schemas"
)

func letters(t *testing.T, nc *nats.Conn) *DeadLetters {
	t.Helper()
	d, err := NewDeadLetters(nc)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// A message that the handler refuses becomes a dead letter, its range is handled, and the others come once.
func TestRefusedMessageIsADeadLetter(t *testing.T) {
	_, nc, js := start(t)
	publish(t, js, "gw", 1, 10)
	m := NewMetrics(prometheus.NewRegistry())
	calls := 0
	run(t, ledger(t, nc, Config{}, m), func(_ context.Context, b schemas.Batch[*schemas.Report]) error {
		calls++
		if b.First <= 4 && 4 <= b.Last {
			return fmt.Errorf("store: %w", schemas.Refused{{Seq: 4, Detail: "code 469"}})
		}
		return nil
	})
	eventually(t, "all are handled", func() bool { return floor(t, js).Floor == 10 })
	if n := testutil.ToFloat64(m.Refused.WithLabelValues("history", schemas.ReasonRefused)); n != 1 {
		t.Errorf("refused = %v, want 1", n)
	}
	all, err := letters(t, nc).List(t.Context(), "", 100)
	if err != nil || len(all) != 1 {
		t.Fatalf("List = %+v, %v, want one", all, err)
	}
	if l := all[0]; l.Reason != schemas.ReasonRefused || l.Detail != "refused: code 469" || l.Seq != 4 || l.Subject != schemas.UsagePrefix+"gw" || l.Bytes == 0 || l.Body != nil {
		t.Errorf("letter = %+v", l)
	}
}

func TestDeadLetters(t *testing.T) {
	_, nc, js := start(t)
	d := letters(t, nc)
	if all, err := d.List(t.Context(), "", 10); err != nil || len(all) != 0 {
		t.Errorf("List of none = %v, %v", all, err)
	}
	// Two that cannot be read; the second is replayed while it still cannot, and the first is dropped.
	raw(t, js, schemas.UsagePrefix+"gw", []byte("{"))
	raw(t, js, schemas.UsagePrefix+"gw", []byte(`{"seq":1}`))
	publish(t, js, "gw", 3, 3)
	m := NewMetrics(prometheus.NewRegistry())
	j := &journal{}
	run(t, ledger(t, nc, Config{}, m), j.handle)
	eventually(t, "all are handled", func() bool { return floor(t, js).Floor == 3 })
	counts, err := d.Counts(t.Context())
	if err != nil || len(counts) != 2 || counts[schemas.ReasonMalformed] != 1 || counts[schemas.ReasonInvalid] != 1 {
		t.Errorf("Counts = %v, %v", counts, err)
	}
	if all, err := d.List(t.Context(), schemas.ReasonTime, 10); err != nil || len(all) != 0 {
		t.Errorf("List of another reason = %v, %v", all, err)
	}
	l, err := d.Get(t.Context(), 2)
	if err != nil || string(l.Body) != `{"seq":1}` || l.Bytes != 9 || l.Truncated {
		t.Errorf("Get = %+v, %v", l, err)
	}
	if err := d.Replay(t.Context(), 2); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it is a new letter", func() bool { return floor(t, js).Floor == 4 && messages(t, js, schemas.DeadStream) == 2 })
	if err := d.Replay(t.Context(), 2); !errors.Is(err, ErrNoLetter) {
		t.Errorf("Replay again = %v, want ErrNoLetter", err)
	}
	for range 2 {
		if err := d.Drop(t.Context(), 1); err != nil {
			t.Errorf("Drop = %v", err)
		}
	}
	all, err := d.List(t.Context(), "", 10)
	if err != nil || len(all) != 1 || all[0].ID != 3 || all[0].Seq != 4 {
		t.Errorf("List = %+v, %v, want letter 3 about message 4", all, err)
	}
	if j.distinct() != 1 {
		t.Errorf("%d were handled, want 1", j.distinct())
	}
}

// T5: message ids are everybody's, and a letter's can be guessed: a replay that trusted its own would be taken for a duplicate of what a
// gateway has published under it, and the letter would be gone.
func TestT5ReplayIsNobodysDuplicate(t *testing.T) {
	_, nc, js := start(t)
	body, err := schemas.EncodeReport(report("b", 1, 1))
	if err != nil {
		t.Fatal(err)
	}
	msg := &nats.Msg{Subject: schemas.DeadPrefix + schemas.ReasonRefused, Data: body, Header: nats.Header{HeaderSubject: {schemas.UsagePrefix + "gw"},
		HeaderStream: {schemas.UsageStream}, headerContentType: {schemas.ContentProtobuf}}}
	if _, err := js.PublishMsg(t.Context(), msg); err != nil {
		t.Fatal(err)
	}
	l, err := letters(t, nc).Get(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := js.Publish(t.Context(), schemas.UsagePrefix+"rogue", nil, jetstream.WithMsgID(l.replayID())); err != nil {
		t.Fatal(err)
	}
	if err := letters(t, nc).Replay(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	if n, dead := messages(t, js, schemas.UsageStream), messages(t, js, schemas.DeadStream); n != 2 || dead != 0 {
		t.Errorf("%d messages and %d dead letters, want 2 and 0", n, dead)
	}
	s, err := js.Stream(t.Context(), schemas.UsageStream)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := s.GetLastMsgForSubject(t.Context(), schemas.UsagePrefix+"gw"); err != nil || string(got.Data) != string(body) || got.Header.Get(headerContentType) != schemas.ContentProtobuf {
		t.Errorf("replayed = %+v, %v", got, err)
	}
}

func TestTruncatedLetterIsNotReplayed(t *testing.T) {
	_, nc, js := start(t)
	msg := &nats.Msg{Subject: schemas.DeadPrefix + schemas.ReasonSize, Data: []byte("beginning"), Header: nats.Header{HeaderSubject: {schemas.UsagePrefix + "gw"},
		HeaderStream: {schemas.UsageStream}, HeaderTruncated: {"2000000"}}}
	if _, err := js.PublishMsg(t.Context(), msg); err != nil {
		t.Fatal(err)
	}
	if err := letters(t, nc).Replay(t.Context(), 1); !errors.Is(err, ErrTruncated) {
		t.Errorf("Replay = %v, want ErrTruncated", err)
	}
	if n, dead := messages(t, js, schemas.UsageStream), messages(t, js, schemas.DeadStream); n != 0 || dead != 1 {
		t.Errorf("%d reports and %d dead letters, want 0 and 1", n, dead)
	}
}

// Whoever else replays a letter at the same time, or has died before he could take it out: its message is stored once, so that one
// that still cannot be taken does not become several letters.
func TestReplaysOfOneLetterAreOne(t *testing.T) {
	_, nc, js := start(t)
	const n = 20
	for i := range n {
		msg := &nats.Msg{Subject: schemas.DeadPrefix + schemas.ReasonMalformed, Data: fmt.Appendf(nil, "{%d", i%2), Header: nats.Header{
			HeaderSubject: {schemas.UsagePrefix + "gw"}, HeaderStream: {schemas.UsageStream}, headerContentType: {schemas.ContentJSON}}}
		if _, err := js.PublishMsg(t.Context(), msg); err != nil {
			t.Fatal(err)
		}
	}
	d := letters(t, nc)
	first, err := d.Get(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.publish(t.Context(), &first); err != nil { // and died
		t.Fatal(err)
	}
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for id := uint64(1); id <= n; id++ {
				if err := d.Replay(t.Context(), id); err != nil && !errors.Is(err, ErrNoLetter) {
					t.Errorf("Replay %d = %v", id, err)
				}
			}
		})
	}
	all.Wait()
	if stored, dead := messages(t, js, schemas.UsageStream), messages(t, js, schemas.DeadStream); stored != n || dead != 0 {
		t.Errorf("%d messages and %d letters, want %d and 0", stored, dead, n)
	}
}

// A letter is told as far as it can be read, and its gateway is that of its subject.
func TestClaimOfALetter(t *testing.T) {
	const subject = schemas.UsagePrefix + "gw"
	r := report("b", 7, 1)
	r.Gateway = "other"
	body, err := schemas.EncodeReport(r)
	if err != nil {
		t.Fatal(err)
	}
	whole := Claim{Gateway: "gw", Boot: "b", Seq: 7, Requests: r.Requests(), Counted: true}
	cut := Claim{Gateway: "gw", Boot: "b", Seq: 7}
	for name, c := range map[string]struct {
		subject, body string
		want          Claim
	}{
		"protobuf":               {subject, string(body), whole},
		"protobuf, cut":          {subject, string(body[:len(body)-3]), cut},
		"no gateway's":           {"weir.usage.v1.g!w", string(body), Claim{Boot: "b", Seq: 7, Requests: r.Requests(), Counted: true}},
		"another gateway":        {subject, `{"gateway":"other","boot":"b","seq":7,"usage":[{"allowed":2,"rejected":3,"ts":"no time"}]}`, Claim{"gw", "b", 7, 5, true}},
		"unknown field":          {subject, `{"BOOT":"b","what":{"seq":3},"seq":7,"usage":[{"allowed":2}],"more":[]}`, Claim{"gw", "b", 7, 2, true}},
		"JSON, cut":              {subject, `{"boot":"b","seq":7,"usage":[{"allowed":2}`, cut},
		"JSON, cut at the end":   {subject, `{"boot":"b","seq":7,"usage":[]`, cut},
		"a wrong count":          {subject, `{"boot":"b","usage":[{"allowed":-2}],"seq":7}`, cut},
		"a count too large":      {subject, `{"boot":"b","seq":7,"usage":[{"allowed":18446744073709551615}]}`, Claim{"gw", "b", 7, 0, false}},
		"no boot":                {subject, `{"seq":7,"usage":[{"allowed":2}]}`, Claim{"gw", "", 0, 2, true}},
		"a boot that is none":    {subject, `{"boot":"a'b","seq":7}`, Claim{Gateway: "gw"}},
		"seq twice":              {subject, `{"boot":"b","seq":7,"seq":8,"usage":[{"allowed":2}]}`, Claim{Gateway: "gw"}},
		"rubbish":                {subject, "rubbish", Claim{Gateway: "gw"}},
		"rubbish in braces":      {subject, "{rubbish", Claim{Gateway: "gw"}},
		"nothing":                {subject, "", Claim{Gateway: "gw"}},
		"only the brace":         {subject, " {", Claim{Gateway: "gw"}},
		"protobuf of no report":  {subject, "\x08\x01", Claim{Gateway: "gw"}},
		"the largest of all seq": {subject, `{"boot":"b","seq":18446744073709551615}`, Claim{"gw", "b", 1<<64 - 1, 0, true}},
	} {
		if got := (&DeadLetter{Subject: c.subject, Body: []byte(c.body)}).Claim(); got != c.want {
			t.Errorf("%s: Claim = %+v, want %+v", name, got, c.want)
		}
	}
}
