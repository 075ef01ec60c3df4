package schemas

import (
	"encoding/json"
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"
)

// Ranges against a set, in any order.
func TestRangesAreASet(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		var r Ranges
		set := map[uint64]bool{}
		for range rapid.IntRange(1, 200).Draw(t, "n") {
			n := rng.Uint64N(60) + 1
			var added bool
			if r, added = r.Add(n); added == set[n] {
				t.Fatalf("Add(%d) says new = %v, want %v", n, added, !set[n])
			}
			set[n] = true
			for n := range uint64(62) {
				if r.Has(n) != set[n] {
					t.Fatalf("Has(%d) = %v with %v, want %v", n, r.Has(n), r, set[n])
				}
			}
			for i := 1; i < len(r); i++ {
				if r[i][0] <= r[i-1][1]+1 {
					t.Fatalf("%v touch or overlap", r)
				}
			}
		}
		b, err := json.Marshal(Stored{Boots: map[string]Ranges{"b": r}})
		if err != nil {
			t.Fatal(err)
		}
		s, err := DecodeStored(b)
		if err != nil {
			t.Fatal(err)
		}
		for n := range uint64(62) {
			if s.Has("b", n) != set[n] {
				t.Fatalf("decoded: Has(%d) = %v", n, s.Has("b", n))
			}
		}
	})
}

func TestStoredThatNoHistoryWrites(t *testing.T) {
	for _, b := range []string{"", "[]", `{"boots":{"b":[[0,3]]}}`, `{"boots":{"b":[[5,3]]}}`, `{"boots":{"b":[[5,9],[7,8]]}}`, `{"boots":{"b":[[1,-1]]}}`} {
		if s, err := DecodeStored([]byte(b)); err == nil {
			t.Errorf("DecodeStored(%s) = %+v, want an error", b, s)
		}
	}
}
