package clickhouse

import (
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"testing"

	"github.com/weirhq/weir/internal/embedded/embeddedtest"
)

// T14: a second flush under a token is dropped without a word. A token goes to a table in one request, also where a batch is more
// than one insert.
func TestT14ATokenIsSentOnce(t *testing.T) {
	server := embeddedtest.ClickHouse(t)
	to, err := url.Parse(server.URL())
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	sent := map[string]int{} // inserts by table and token
	pass := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: to.Scheme, Host: to.Host})
	through := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if q := r.URL.Query(); strings.HasPrefix(q.Get("query"), "INSERT INTO ") {
			table := strings.Fields(q.Get("query"))[2]
			mu.Lock()
			sent[table+" "+q.Get("insert_deduplication_token")]++
			mu.Unlock()
		}
		pass.ServeHTTP(w, r)
	}))
	t.Cleanup(through.Close)
	s := open(t, strings.Replace(server.URL(), to.Host, strings.TrimPrefix(through.URL, "http://"), 1))
	store(t, s, batchOf(1, reportAt("a", 1, noon, maxRows-10), reportAt("b", 1, noon, 20), reportAt("c", 1, noon, 20)))
	wantUsage(t, s, maxRows+30, 3*(maxRows+30))
	mu.Lock()
	defer mu.Unlock()
	usage := 0
	for what, n := range sent {
		table, token, _ := strings.Cut(what, " ")
		if n != 1 || token == "" {
			t.Errorf("%d inserts of %q, want one, under a token", n, what)
		}
		if table == "usage" {
			usage++
		}
	}
	if usage != 2 {
		t.Errorf("%d inserts into usage, want 2: %v", usage, sent)
	}
}

// T16: with a partition its tokens are forgotten, so that a redo would be stored again, in every roll-up too. Which reports are
// stored is known from a table of its own.
func TestT16APartitionDroppedIsNotFilledAgain(t *testing.T) {
	s := fresh(t)
	b := batchOf(1, reportAt("a", 1, noon, 100))
	store(t, s, b)
	run(t, s, "ALTER TABLE usage DROP PARTITION 202611")
	store(t, s, b)
	if got := number(t, s, "(SELECT count() FROM usage)"); got != 0 {
		t.Errorf("%d rows in the partition that was dropped, want none", got)
	}
	for _, r := range rollups {
		if got := number(t, s, "(SELECT sum(allowed + rejected) FROM "+r.name+")"); got != 300 {
			t.Errorf("%s has %d requests, want 300", r.name, got)
		}
	}
}

// T17: defaults of the server and of a user decide nothing: with all of them the other way round a redo is harmless, in the
// ledger and in the roll-ups.
func TestT17DefaultsDecideNothing(t *testing.T) {
	server := embeddedtest.ClickHouse(t)
	s := open(t, server.URL()+"?async_insert=1&wait_for_async_insert=0&insert_deduplicate=0&deduplicate_insert=disable"+
		"&deduplicate_blocks_in_dependent_materialized_views=0&max_insert_block_size=10&min_insert_block_size_rows=1&materialized_views_ignore_errors=1")
	run(t, s, "ALTER TABLE reports ADD CONSTRAINT never CHECK 0") // or it would be known by the report
	b := batchOf(1, acrossMonths("a", 1, 500))
	for range 3 {
		if err := s.Reports(t.Context(), b); err == nil {
			t.Fatal("Reports = nil though the report cannot be noted")
		}
	}
	run(t, s, "ALTER TABLE reports DROP CONSTRAINT never")
	store(t, s, b)
	wantUsage(t, s, 500, 1500)
}
