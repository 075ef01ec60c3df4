package main

import (
	"reflect"
	"strings"
	"testing"
	"time"
)

// TestAPlanIsItsSeed: what breaks when depends on nothing else, and faults of one target do not overlap.
func TestAPlanIsItsSeed(t *testing.T) {
	seen := map[kind]bool{}
	for seed := range uint64(500) {
		p := newPlan(seed)
		if again := newPlan(seed); !reflect.DeepEqual(p, again) {
			t.Fatalf("seed %d gives two plans:\n%s%s", seed, p, again)
		}
		free := map[string]time.Duration{}
		for _, f := range p.Faults {
			seen[f.Kind] = true
			if f.At < 0 || f.At >= window || f.Target == "" || f.Kind == "" {
				t.Errorf("seed %d: %s", seed, f)
			}
			if until, ok := free[f.Target]; ok && f.At <= until {
				t.Errorf("seed %d: %s begins before the last fault of its target has ended", seed, f)
			}
			free[f.Target] = f.At + f.For
		}
		for _, f := range newPlan(seed, "gw1", "gw2", "gw3").Faults {
			if strings.HasPrefix(f.Target, "gw") && (f.Kind == kill || f.Kind == term) {
				t.Errorf("seed %d: a spared gateway has %s", seed, f)
			}
		}
	}
	for _, k := range []kind{kill, term, pause, flush, forget, cut, reset, refuse, hold, slow, cutUp, cutDown, swallowA} {
		if !seen[k] {
			t.Errorf("no seed of 500 has a %s", k)
		}
	}
}
