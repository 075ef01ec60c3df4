package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/weirhq/weir/cmd/internal/app"
	"github.com/weirhq/weir/cmd/internal/text"
	"github.com/weirhq/weir/ingest/jetstream"
	"github.com/weirhq/weir/internal/run"
	"github.com/weirhq/weir/schemas"
)

func dlqCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "dlq",
		Short:   "Look at the messages that could not be taken, replay or drop them",
		Example: "  weir dlq list --reason refused\n  weir dlq replay 17 18\n  weir dlq drop --all --reason malformed",
		Args:    known,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return usagef("dlq what? One of: list, show, replay, drop")
		},
	}
	cmd.AddCommand(dlqListCommand(), dlqShowCommand(),
		dlqEachCommand("replay", "Publish messages again where they came from, and take them out",
			`A letter is taken out once its message is stored in the stream again. However often that is repeated, and by however many at once, its
usage is counted once. A message that still cannot be taken comes back as a new dead letter.`, func(d *jetstream.DeadLetters, cmd *cobra.Command, id uint64) error {
				return d.Replay(cmd.Context(), id)
			}),
		dlqEachCommand("drop", "Take messages out for good", "What is dropped is gone.",
			func(d *jetstream.DeadLetters, cmd *cobra.Command, id uint64) error {
				if _, err := d.Get(cmd.Context(), id); err != nil { // one that is not there was not dropped now
					return err
				}
				return d.Drop(cmd.Context(), id)
			}))
	return cmd
}

// letterBox is what the dlq commands have in common.
type letterBox struct {
	servers servers
	out     output
}

func (b *letterBox) bind(cmd *cobra.Command) {
	b.servers.bind(cmd)
	b.out.bind(cmd)
}

// open connects and calls f.
func (b *letterBox) open(cmd *cobra.Command, f func(*jetstream.DeadLetters) error) (err error) {
	if err := b.out.validate(); err != nil {
		return err
	}
	log, err := logger(cmd, "error")
	if err != nil {
		return err
	}
	if err := b.servers.resolve(); err != nil {
		return err
	}
	var stack run.Stack
	defer func() { err = errors.Join(err, stack.Stop(time.Second)) }()
	nc, err := app.Connect(cmd.Context(), b.servers.nats, "dlq", true, app.NewMetrics(), &stack, log)
	if err != nil {
		return err
	}
	d, err := jetstream.NewDeadLetters(nc)
	if err != nil {
		return err
	}
	return f(d)
}

// deadList is the answer of dlq list.
type deadList struct {
	Counts  map[string]uint64      `json:"counts"` // of all letters, by reason
	Letters []jetstream.DeadLetter `json:"letters"`
}

func dlqListCommand() *cobra.Command {
	var b letterBox
	var reason string
	var n int
	cmd := &cobra.Command{
		Use:     "list",
		Short:   "The oldest dead letters, and how many there are for each reason",
		Example: "  weir dlq list --reason refused -n 20 -o json",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if n < 1 {
				return usagef("-n %d, want 1 or more", n)
			}
			if err := checkReason(reason); err != nil {
				return err
			}
			return b.open(cmd, func(d *jetstream.DeadLetters) (err error) {
				var list deadList
				if list.Counts, err = d.Counts(cmd.Context()); err != nil {
					return err
				}
				if list.Letters, err = d.List(cmd.Context(), reason, n); err != nil {
					return err
				}
				return b.out.write(cmd.OutOrStdout(), list, func(w io.Writer) {
					fmt.Fprintln(w, "ID\tTIME\tREASON\tSUBJECT\tSEQ\tBYTES\tDETAIL")
					for _, l := range list.Letters {
						text.Printf(w, "%d\t%s\t%s\t%s\t%d\t%d\t%s\n", l.ID, l.Time.Format(time.RFC3339), l.Reason, l.Subject, l.Seq, l.Bytes, l.Detail)
					}
					counts := map[string]int{}
					for reason, n := range list.Counts {
						counts[reason] = int(n)
					}
					fmt.Fprintln(w)
					printCounts(w, "REASON\tLETTERS", counts)
				})
			})
		},
	}
	cmd.Flags().StringVar(&reason, "reason", "", "only of this reason")
	cmd.Flags().IntVarP(&n, "number", "n", 100, "letters listed")
	b.bind(cmd)
	return cmd
}

func dlqShowCommand() *cobra.Command {
	var b letterBox
	cmd := &cobra.Command{
		Use:     "show ID",
		Short:   "One dead letter with its body",
		Example: "  weir dlq show 17",
		Args:    oneArg("a letter's id"),
		RunE: func(cmd *cobra.Command, args []string) error {
			ids, err := letterIDs(args)
			if err != nil {
				return err
			}
			return b.open(cmd, func(d *jetstream.DeadLetters) error {
				l, err := d.Get(cmd.Context(), ids[0])
				if err != nil {
					return err
				}
				return b.out.write(cmd.OutOrStdout(), l, func(w io.Writer) {
					text.Printf(w, "id\t%d\ntime\t%s\nreason\t%s\ndetail\t%s\nsubject\t%s\nmessage\t%d of %s, arrived %s\ncontent type\t%s\nbytes\t%d\ntruncated\t%t\n",
						l.ID, l.Time.Format(time.RFC3339), l.Reason, l.Detail, l.Subject, l.Seq, l.Stream, l.Arrived.Format(time.RFC3339), dash(l.ContentType), l.Bytes, l.Truncated)
					if r, err := l.Report(); err == nil {
						if b, err := json.Marshal(r); err == nil {
							text.Printf(w, "report\t%s\n", string(b))
							return
						}
					}
					if utf8.Valid(l.Body) {
						text.Printf(w, "body\t%q\n", l.Body)
					} else {
						text.Printf(w, "body\t%x\n", l.Body)
					}
				})
			})
		},
	}
	b.bind(cmd)
	return cmd
}

// dlqEachCommand does something to the letters that are named, or to all of a reason that are there when it begins.
func dlqEachCommand(name, short, long string, do func(*jetstream.DeadLetters, *cobra.Command, uint64) error) *cobra.Command {
	var b letterBox
	var reason string
	var all bool
	cmd := &cobra.Command{
		Use:     name + " ID…",
		Short:   short,
		Long:    long,
		Example: fmt.Sprintf("  weir dlq %s 17 18\n  weir dlq %s --all --reason refused", name, name),
		RunE: func(cmd *cobra.Command, args []string) error {
			ids, err := letterIDs(args)
			if err != nil {
				return err
			}
			switch {
			case all == (len(ids) > 0):
				return usagef("%s wants ids, or --all", cmd.CommandPath())
			case reason != "" && !all:
				return usagef("--reason goes with --all")
			}
			if err := checkReason(reason); err != nil {
				return err
			}
			return b.open(cmd, func(d *jetstream.DeadLetters) error {
				if all {
					list, err := d.List(cmd.Context(), reason, 1<<31-1)
					if err != nil {
						return err
					}
					for _, l := range list {
						ids = append(ids, l.ID)
					}
				}
				return eachLetter(cmd, &b, d, name, ids, all, do)
			})
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "all letters that are there now")
	cmd.Flags().StringVar(&reason, "reason", "", "with --all, only of this reason")
	b.bind(cmd)
	return cmd
}

// checkReason refuses what is no reason; empty is all of them.
func checkReason(reason string) error {
	if reason != "" && schemas.ValidName(reason) != nil {
		return usagef("--reason %q, want one that weir dlq list shows", reason)
	}
	return nil
}

// letterResult is what became of one letter.
type letterResult struct {
	ID    uint64 `json:"id"`
	Done  bool   `json:"done"`
	Gone  bool   `json:"gone,omitempty"` // somebody else took it out after --all had listed it
	Error string `json:"error,omitempty"`
}

func eachLetter(cmd *cobra.Command, b *letterBox, d *jetstream.DeadLetters, name string, ids []uint64, all bool, do func(*jetstream.DeadLetters, *cobra.Command, uint64) error) error {
	results := make([]letterResult, len(ids))
	var failed error
	done, gone := 0, 0
	for i, id := range ids {
		results[i] = letterResult{ID: id, Done: true}
		err := do(d, cmd, id)
		if all && errors.Is(err, jetstream.ErrNoLetter) {
			results[i] = letterResult{ID: id, Gone: true}
			gone++
			continue
		}
		if err != nil {
			results[i] = letterResult{ID: id, Error: err.Error()}
			failed = err
			if app.Unreachable(err) || cmd.Context().Err() != nil {
				results = results[:i+1]
				break
			}
			continue
		}
		done++
	}
	if err := b.out.write(cmd.OutOrStdout(), results, func(w io.Writer) {
		for _, r := range results {
			if r.Error != "" {
				text.Printf(w, "%d\t%s\n", r.ID, r.Error)
			}
		}
		text.Printf(w, "%s: %d of %d letters", name, done, len(ids))
		if gone > 0 {
			text.Printf(w, ", %d were gone already", gone)
		}
		fmt.Fprintln(w)
	}); err != nil {
		return err
	}
	return failed
}

// letterIDs are those named, each once.
func letterIDs(args []string) ([]uint64, error) {
	var ids []uint64
	for _, a := range args {
		id, err := strconv.ParseUint(a, 10, 64)
		if err != nil || id == 0 {
			return nil, usagef("no dead letter has the id %q: see weir dlq list", a)
		}
		if !slices.Contains(ids, id) {
			ids = append(ids, id)
		}
	}
	return ids, nil
}
