package spool

import "testing"

// Somebody else reads what a running gateway keeps, as it is, and disturbs nothing.
func TestReadBesideARunningGateway(t *testing.T) {
	dir := t.TempDir()
	if all, err := Read(dir, "gw"); err != nil || len(all) != 0 {
		t.Errorf("Read of an empty folder = %v, %v", all, err)
	}
	s := open(t, Config{}, dir, "b", nil)
	add(t, s, 1, report("b", 1, 3), report("b", 2, 4))
	add(t, s, 2, report("b", 3, 5))
	all, err := Read(dir, "gw")
	if err != nil || len(all) != 3 {
		t.Fatalf("Read = %v, %v, want 3 reports", all, err)
	}
	for i, r := range all {
		if r.Gateway != "gw" || r.Boot != "b" || r.Seq != uint64(i+1) || r.Requests() != uint64(i+3) {
			t.Errorf("report %d = %+v", i, r)
		}
	}
	if got := ids(s); len(got) != 3 {
		t.Errorf("the gateway has %v to send, want all three", got)
	}
}
