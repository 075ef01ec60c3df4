package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/weirhq/weir/aggregator/clickhouse"
)

func migrateCommand() *cobra.Command {
	var s servers
	var level string
	cmd := &cobra.Command{
		Use:   "migrate",
		Short: "Bring the ClickHouse schema up to this version, and make again what of it is gone",
		Long: `Migrate applies the migrations that are new, and makes again tables, views, columns and projections that are gone, and views that select
something else than they did. A column of another type, or a table that is detached, is put right by hand, since data may go with it: migrate
does nothing then, exits 1 and says the statement. It warns of a ledger that ClickHouse deletes by age.`,
		Example: "  weir migrate --clickhouse clickhouse://weir:secret@10.0.0.6:9000/weir",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			log, err := logger(cmd, level)
			if err != nil {
				return err
			}
			if err := s.resolve(); err != nil {
				return err
			}
			store, err := clickhouse.Open(s.clickhouse, log)
			if err != nil {
				return err
			}
			defer func() { err = errors.Join(err, store.Close()) }()
			return store.Migrate(cmd.Context(), func(line string) { fmt.Fprintln(cmd.OutOrStdout(), line) })
		},
	}
	bind(cmd, map[string]*string{"log-level": &level})
	s.bind(cmd)
	return cmd
}
