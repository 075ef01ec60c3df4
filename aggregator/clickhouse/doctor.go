package clickhouse

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	ch "github.com/ClickHouse/clickhouse-go/v2"
)

// oldest is the first release in which a redo reaches the roll-ups the way that Reports relies on.
var oldest = [2]int{24, 8}

// ledgerTables must forget no deduplication token soon; durableTables must not lose on a power cut what was acknowledged.
var (
	ledgerTables  = []string{"usage", "usage_1m", "usage_1h", "usage_1d", "tokens", "rejections", "reports", "alerts", "corrections", "correction_refs"}
	durableTables = []string{"usage", "usage_1m", "usage_1h", "usage_1d", "reports", "alerts", "policy_changes", "corrections", "correction_refs"}
)

// manyParts is a third of where ClickHouse begins to slow inserts down.
const manyParts = 300

// Problems asks the server for what would lose usage, count it twice or refuse it, and says each in one line. The server's
// defaults for inserts do not matter, since every insert says its own; what forbids that does.
func (s *Store) Problems(ctx context.Context) []string {
	ctx, cancel := context.WithTimeout(ctx, queryTimeout)
	defer cancel()
	version, err := s.Version(ctx)
	if err != nil {
		return []string{err.Error()}
	}
	var out []string
	if v := release(version); slices.Compare(v[:], oldest[:]) < 0 {
		out = append(out, fmt.Sprintf("ClickHouse %s is older than %d.%d: a repeated insert may be missing from or doubled in the roll-ups", version, oldest[0], oldest[1]))
	}
	if err := s.Check(ctx); err != nil {
		out = append(out, err.Error())
	}
	for _, ask := range []func(context.Context) ([]string, error){s.pinned, s.weakTables, s.fading, s.zoneless, s.parts} {
		lines, err := ask(ctx)
		if err != nil {
			lines = append(lines, s.explain("look for problems", err).Error())
		}
		out = append(out, lines...)
	}
	return out
}

func release(version string) (v [2]int) {
	for i, part := range strings.SplitN(version, ".", 3) {
		if i < 2 {
			v[i], _ = strconv.Atoi(part)
		}
	}
	return v
}

// pinned are insert settings that the user's profile holds at another value than ours.
func (s *Store) pinned(ctx context.Context) ([]string, error) {
	var out []string
	err := s.each(ctx, "SELECT name, value FROM system.settings WHERE readonly = 1 AND name IN {names:Array(String)} ORDER BY name",
		func(name, value string) {
			if want := fmt.Sprint(insertSettings[name]); want != value && name != "insert_deduplication_token" {
				out = append(out, fmt.Sprintf("user %q may not set %s, which is %s: inserts will be refused, want %s", s.user(), name, value, want))
			}
		}, ch.Named("names", settingNames()))
	return out, err
}

// weakTables are tables without deduplication window, or whose inserts may vanish with the power. Replicated tables
// remember tokens in Keeper, and have a replica.
func (s *Store) weakTables(ctx context.Context) ([]string, error) {
	var out []string
	err := s.each(ctx, "SELECT name, engine_full FROM system.tables WHERE database = currentDatabase() AND engine LIKE '%MergeTree' AND engine NOT LIKE 'Replicated%' AND engine NOT LIKE 'Shared%' ORDER BY name",
		func(name, engine string) {
			if slices.Contains(ledgerTables, name) && tableSetting(engine, "non_replicated_deduplication_window") == 0 {
				out = append(out, fmt.Sprintf("table %s has no non_replicated_deduplication_window: a repeated insert is stored twice", name))
			}
			if slices.Contains(durableTables, name) && (tableSetting(engine, "fsync_after_insert") == 0 || tableSetting(engine, "fsync_part_directory") == 0) {
				out = append(out, fmt.Sprintf("table %s has no fsync_after_insert and fsync_part_directory: a power cut may lose what was acknowledged", name))
			}
		})
	return out, err
}

// Where a CREATE statement says that a column, or the whole table, has a TTL, and what of that only moves or compresses.
var (
	columnTTL = regexp.MustCompile("`(\\w+)` [^`]*? TTL ([^`]*?)(?:, `|$)")
	inParens  = regexp.MustCompile(`\([^()]*\)`)
	harmless  = regexp.MustCompile(` TO (?:DISK|VOLUME) '| RECOMPRESS `)
)

// fading are tables that are to be kept, whose rows ClickHouse deletes by age, or a column of them.
func (s *Store) fading(ctx context.Context) ([]string, error) {
	var out []string
	err := s.each(ctx, "SELECT name, create_table_query FROM system.tables WHERE database = currentDatabase() AND name IN {names:Array(String)} AND create_table_query LIKE '% TTL %' ORDER BY name",
		func(name, create string) {
			columns, engine, _ := strings.Cut(uncommented(create), ") ENGINE = ")
			for _, m := range columnTTL.FindAllStringSubmatch(columns, -1) {
				out = append(out, fmt.Sprintf("column %s of table %s has TTL %s: what it holds is lost by age: ALTER TABLE %s MODIFY COLUMN %s REMOVE TTL", m[1], name, m[2], name, m[1]))
			}
			_, ttl, _ := strings.Cut(engine, " TTL ")
			ttl, _, _ = strings.Cut(ttl, " SETTINGS ")
			flat := ttl
			for inParens.MatchString(flat) {
				flat = inParens.ReplaceAllString(flat, "")
			}
			if ttl != "" && slices.ContainsFunc(strings.Split(flat, ","), func(rule string) bool { return !harmless.MatchString(rule) }) {
				out = append(out, fmt.Sprintf("table %s has TTL %s: its rows are deleted by age: ALTER TABLE %s REMOVE TTL", name, ttl, name))
			}
		}, ch.Named("names", durableTables))
	return out, err
}

// tableSetting finds a number among the SETTINGS that end a table's engine; 0 when it is not said.
func tableSetting(engine, name string) uint64 {
	_, settings, _ := strings.Cut(engine, "SETTINGS ")
	for s := range strings.SplitSeq(settings, ", ") {
		if value, ok := strings.CutPrefix(s, name+" = "); ok {
			n, _ := strconv.ParseUint(value, 10, 64)
			return n
		}
	}
	return 0
}

// zoneless are time columns that would take the server's time zone.
func (s *Store) zoneless(ctx context.Context) ([]string, error) {
	var out []string
	err := s.each(ctx, "SELECT table || '.' || name, type FROM system.columns WHERE database = currentDatabase() AND type LIKE '%DateTime%' AND type NOT LIKE '%''UTC''%' ORDER BY 1",
		func(name, typ string) {
			out = append(out, fmt.Sprintf("column %s is %s, without 'UTC': it takes the server's time zone", name, typ))
		})
	return out, err
}

// parts are partitions with so many parts that inserts will soon be slowed down or refused.
func (s *Store) parts(ctx context.Context) ([]string, error) {
	var out []string
	err := s.each(ctx, "SELECT table || ' ' || partition, toString(count() AS n) FROM system.parts WHERE active AND database = currentDatabase() GROUP BY table, partition HAVING n > {many:UInt32} ORDER BY 1",
		func(name, n string) {
			out = append(out, fmt.Sprintf("partition %s has %s parts: merges do not keep up with inserts", name, n))
		}, ch.Named("many", uint32(manyParts)))
	return out, err
}

// each calls row for every row of a query for two strings. Errors are the driver's.
func (s *Store) each(ctx context.Context, sql string, row func(a, b string), args ...any) error {
	rows, err := s.conn.Query(ctx, sql, args...)
	if err != nil {
		return err
	}
	var a, b string
	for rows.Next() {
		if err := rows.Scan(&a, &b); err != nil {
			return errors.Join(err, rows.Close())
		}
		row(a, b)
	}
	return errors.Join(rows.Err(), rows.Close())
}
