package obstest

import (
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
)

// Whatever is read while others write is whole lines, and in the end all are there.
func TestLinesAreReadWhileTheyAreWritten(t *testing.T) {
	var out Lines
	log := slog.New(slog.NewTextHandler(&out, nil))
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for range 100 {
				log.Info("here")
				if s := out.String(); !strings.HasSuffix(s, "\n") {
					t.Errorf("the log ends with %.20q", s[max(len(s)-20, 0):])
				}
			}
		})
	}
	all.Wait()
	if n := strings.Count(out.String(), fmt.Sprintln("msg=here")); n != 400 {
		t.Errorf("%d lines, want 400", n)
	}
}
