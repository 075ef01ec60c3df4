package rig

import (
	"context"
	"net"
	"net/http"
	"sync/atomic"
	"testing"
	"time"
)

func TestVerdict(t *testing.T) {
	c := Cell{"gw1", "acme", "orders"}
	for _, tt := range []struct {
		name          string
		answered      Outcomes
		unanswered    uint64
		stored        Outcomes
		lost, doubled uint64
	}{
		{"equal", Outcomes{"": 5, "contract": 2}, 0, Outcomes{"": 5, "contract": 2}, 0, 0},
		{"nothing is there", Outcomes{"": 5, "contract": 2}, 0, nil, 7, 0},
		{"one twice", Outcomes{"": 5}, 0, Outcomes{"": 6}, 0, 1},
		{"without an answer, and there", Outcomes{"": 5}, 2, Outcomes{"": 6, "guard": 1}, 0, 0},
		{"without an answer, and not there", Outcomes{"": 5}, 2, Outcomes{"": 5}, 0, 0},
		{"without an answer, and there twice", Outcomes{"": 5}, 1, Outcomes{"": 6, "contract": 1}, 0, 1},
		{"one that was lost is not made up for by one without an answer", Outcomes{"": 5, "contract": 2}, 1, Outcomes{"": 6, "contract": 1}, 1, 0},
		{"under another outcome than the caller was told", Outcomes{"": 5, "contract": 2}, 0, Outcomes{"": 6, "contract": 1}, 1, 1},
		{"never sent", nil, 0, Outcomes{"": 3}, 0, 3},
	} {
		var v Verdict
		oracle := map[Cell]*Entry{c: {Answered: tt.answered, Unanswered: tt.unanswered}}
		if tt.answered == nil {
			oracle = nil
		}
		v.History(oracle, map[Cell]Outcomes{c: tt.stored})
		if v.Lost != tt.lost || v.Doubled != tt.doubled || (len(v.Lines) > 0) != (tt.lost+tt.doubled > 0) {
			t.Errorf("%s: lost %d, doubled %d, want %d, %d (%q)", tt.name, v.Lost, v.Doubled, tt.lost, tt.doubled, v.Lines)
		}
	}
	// One cell's slack is not another's.
	var v Verdict
	v.History(map[Cell]*Entry{c: {Unanswered: 5}}, map[Cell]Outcomes{{"gw2", "acme", "orders"}: {"": 1}})
	if v.Lost != 0 || v.Doubled != 1 {
		t.Errorf("a request of another gateway: lost %d, doubled %d, want 0, 1", v.Lost, v.Doubled)
	}

	oracle := map[Cell]*Entry{c: {Answered: Outcomes{"": 3, "contract": 9}, Unanswered: 1}, {"gw2", "acme", "other"}: {Answered: Outcomes{"": 4}}}
	for _, tt := range []struct {
		account               Account // of the first gateway; the other one's is whole
		total                 uint64
		killed                string
		lost, doubled, behind uint64
	}{
		{Account{4, 0, 0, 4}, 8, "", 0, 0, 0},
		{Account{4, 0, 0, 4}, 7, "", 1, 0, 0},
		{Account{4, 0, 0, 4}, 10, "gw1", 0, 2, 0},
		{Account{4, 0, 0, 4}, 0, "gw1", 8, 0, 0},
		{Account{4, 2, 0, 3}, 7, "", 1, 0, 0},
		{Account{4, 2, 0, 3}, 7, "gw2", 1, 0, 0},
		{Account{4, 2, 0, 3}, 7, "gw1", 0, 0, 1},
		{Account{4, 2, 0, 2}, 6, "gw1", 0, 0, 2},
		{Account{4, 2, 0, 1}, 5, "gw1", 1, 0, 3},
		{Account{4, 2, 0, 3}, 8, "gw1", 0, 1, 1},
		{Account{4, 0, 0, 5}, 9, "", 0, 1, 0},
		{Account{4, 0, 0, 5}, 9, "gw1", 0, 0, 0}, // the one without an answer
		{Account{4, 0, 0, 6}, 10, "gw1", 0, 1, 0},
		{Account{4, 0, 1, 6}, 10, "gw1", 0, 0, 0}, // and one that gave its token back
		{Account{4, 0, 1, 5}, 9, "", 0, 1, 0},
	} {
		var v Verdict
		v.Redis(oracle, map[Life]Account{{"gw1", "b", "acme"}: tt.account, {"gw2", "b", "acme"}: {4, 0, 0, 4}}, map[string]uint64{"acme": tt.total}, map[string]bool{tt.killed: true})
		if v.Lost != tt.lost || v.Doubled != tt.doubled || v.Behind != tt.behind {
			t.Errorf("%+v: lost %d, doubled %d, behind %d: %q", tt, v.Lost, v.Doubled, v.Behind, v.Lines)
		}
	}
}

// TestJournalKnowsWhatWasAnswered: the journal has each request that reached the server once, and does not repeat one whose
// connection broke.
func TestJournalKnowsWhatWasAnswered(t *testing.T) {
	var n atomic.Int64
	allowed, refused, cut := atomic.Uint64{}, atomic.Uint64{}, atomic.Uint64{}
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		switch n.Add(1) % 5 {
		case 0:
			cut.Add(1)
			conn, _, err := http.NewResponseController(w).Hijack()
			if err != nil {
				t.Error(err)
				return
			}
			_ = conn.Close()
		case 1:
			refused.Add(1)
			w.Header().Set("RateLimit", `"contract";r=0;t=1`)
			w.WriteHeader(http.StatusTooManyRequests)
		default:
			allowed.Add(1)
			w.Header().Set("RateLimit", `"contract";r=4`)
		}
	})}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = srv.Serve(ln) }()
	defer func() { _ = srv.Close() }()

	j := NewJournal()
	ctx, stop := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer stop()
	Send(ctx, j, 1, 500, map[string][]string{"gw1": {ln.Addr().String()}})
	var a, r uint64
	for c, e := range j.Cells {
		if c.Gateway != "gw1" {
			t.Errorf("cell %v", c)
		}
		a += e.Answered[""]
		r += e.Answered["contract"]
	}
	requests, unanswered := j.Totals()
	if a != allowed.Load() || r != refused.Load() || unanswered != cut.Load() || requests != uint64(n.Load()) || requests == 0 {
		t.Errorf("journal: %d allowed, %d refused, %d without an answer of %d; the server: %d, %d, %d of %d",
			a, r, unanswered, requests, allowed.Load(), refused.Load(), cut.Load(), n.Load())
	}
}
