-- One commit of fsmeta/store/contract.py, atomically. See apply.py for the meaning of each step.
-- KEYS: the rows that this client tracks; ARGV[1]: msgpack of the commit.
-- Everything is validated before the first write, since Redis does not undo a failed script. Only
-- counters are moved early, for Redis alone can add 64-bit numbers; `refuse` moves them back, and
-- one that is 0 then may as well be absent.
-- No number above 2^53 may pass through Lua: counters are compared as decimal strings, and
-- sequences as two words, for `<` of strings follows the server's locale.
-- `known` is the client's token and the highest sequence that it was answered; field `n` of the
-- session has the token and the highest sequence that was applied, and can't be behind. `latest` is
-- what `n` is to be after this commit, if no other commit was faster.
-- ARGV[2], where there is one: letters. `c`: in a cluster, whose slot may be on its way elsewhere;
-- `o`: go on without memory; `m`: tell what MERGE has made.
-- Returns 0 applied (with `m`: the merged records), 1 conflict, 2 fenced, 3 not empty, 4 gone back,
-- 5 outdated, or the tag of the limit exceeded.
local call, pcall, sub = redis.call, redis.pcall, string.sub
local fence, worker, sequence, checks, empties, writes, notes, known, latest, edition, ends =
  unpack(cmsgpack.unpack(ARGV[1]))

local function above(value, limit)
  if sub(value, 1, 1) == '-' then return false end
  return #value > #limit or (#value == #limit and value > limit)
end

-- whether the number in the 8 bytes `one` is at least that in `other`
local function reaches(one, other)
  local one_high, one_low = struct.unpack('>I4I4', one)
  local high, low = struct.unpack('>I4I4', other)
  return one_high > high or (one_high == high and one_low >= low)
end

if ARGV[2] then
  -- A row on its way to another node can't be touched: that must show before the first write.
  -- Few commands ask for all of them: each command has Redis look at every declared key.
  if string.find(ARGV[2], 'c', 1, true) then
    local rows = {}
    if fence then rows[1] = fence end
    for i = 1, #checks, 3 do rows[#rows + 1] = checks[i] end
    for i = 1, #ends, 4 do rows[#rows + 1] = ends[i] end
    for i = 1, #empties do rows[#rows + 1] = empties[i] end
    for i = 1, #writes do rows[#rows + 1] = writes[i][2] end
    for i = 1, #rows, 1000 do call('EXISTS', unpack(rows, i, math.min(i + 999, #rows))) end
  end
  -- Memory is refused only to a script that has not written yet, and HDEL needs none.
  if string.find(ARGV[2], 'o', 1, true) then call('HDEL', writes[1][2], '') end
end

if fence then
  local state = call('HMGET', fence, 'a', worker, 'n')
  local before = state[3]
  if not state[1] then return 2 end
  if before ~= known then
    if not before then
      if sub(known, 9) ~= '\0\0\0\0\0\0\0\0' then return 4 end
    elseif sub(before, 1, 8) ~= sub(known, 1, 8) or not reaches(sub(before, 9), sub(known, 9)) then
      return 4
    elseif reaches(sub(before, 9), sequence) then
      latest = before
    end
  end
  if #writes > 0 and state[2] and reaches(state[2], sequence) then
    call('HSET', fence, worker, state[2]) -- for WAIT, which counts from the last write it saw
    return 0
  end
  if state[1] ~= edition then return 5 end
end
for i = 1, #checks, 3 do
  if call('HGET', checks[i], checks[i + 1]) ~= checks[i + 2] then return 1 end
end
local held = {} -- long values as they are, until a write to their row
for i = 1, #ends, 4 do -- the length and the end of those are enough
  local row, field, length, tail = unpack(ends, i, i + 3)
  local found = call('HGET', row, field)
  if not found or #found ~= length or sub(found, -#tail) ~= tail then return 1 end
  held[row] = {field, found}
end
for i = 1, #empties do
  if call('EXISTS', empties[i]) == 1 then return 3 end
end

-- A client reads everything as it was at one moment (redis_moment.py): note what the fields held
-- before their first change since. Before counters move, and harmless if the commit is refused yet.
if #writes > 0 and call('EXISTS', notes) == 1 then
  local function note(row, field, old)
    call('HSETNX', notes, struct.pack('>I2', #row) .. row .. field, old and '=' .. old or '-')
  end
  for i = 1, #writes do
    local op, row, field = unpack(writes[i], 1, 3)
    if op == 2 then
      local all = call('HGETALL', row)
      for j = 1, #all, 2 do note(row, all[j], all[j + 1]) end
    else
      note(row, field, call('HGET', row, field))
    end
  end
end

local added = {}

-- answer `reply` and leave every counter as it was
local function refuse(reply)
  for j = #added, 1, -1 do
    local row, field, back = unpack(added[j])
    if call('HINCRBY', row, field, back) == 0 then call('HDEL', row, field) end
  end
  return reply
end

local function corrupt(write, why)
  return redis.error_reply('CORRUPT ' .. why .. ' at row ' .. write[2] .. ' field ' .. write[3])
end

-- `record` with the parts of a MERGE changed; nil where they do not fit
local function merge(record, write)
  for j = 4, #write, 2 do
    local at, value = write[j], write[j + 1]
    if type(value) == 'number' then
      if at + 4 > #record then return nil end
      value = struct.unpack('>I4', record, at + 1) + value
      if value < 0 or value >= 4294967296 then return nil end
      value = struct.pack('>I4', value)
    elseif at + #value > #record then
      return nil
    end
    record = sub(record, 1, at) .. value .. sub(record, at + #value + 1)
  end
  return record
end

-- the negative of a decimal
local function minus(value)
  if sub(value, 1, 1) == '-' then return sub(value, 2) end
  return value == '0' and value or '-' .. value
end

-- add `delta` to a counter, and remember `back`; what to answer where that can't be
local function add(write, delta, back, limit, tag)
  local row, field = write[2], write[3]
  local moved = pcall('HINCRBY', row, field, delta)
  if type(moved) == 'table' then
    local why = moved.err
    if string.find(why, 'hash value', 1, true) or string.find(why, 'overflow', 1, true) then
      return corrupt(write, 'counter can not be moved')
    end
    return moved -- no memory, no master: nothing has been written
  end
  added[#added + 1] = {row, field, back}
  if limit == '0' or delta == '0' or sub(delta, 1, 1) == '-' then return nil end
  if limit == '<' then limit = call('HGET', row, field .. '<') end
  if limit and above(call('HGET', row, field), limit) then return tag end
end

local merged = {}
for i = 1, #writes do
  local write = writes[i]
  if write[1] == 5 then
    local record = call('HGET', write[2], write[3])
    if not record then return refuse(1) end
    merged[i] = merge(record, write)
    if not merged[i] then return refuse(corrupt(write, 'record does not take a change')) end
  elseif write[1] == 3 then
    local refusal = add(write, write[4], write[7], write[5], write[6])
    if refusal then return refuse(refusal) end
  elseif write[1] == 6 then
    local amount = call('HGET', write[2], write[4]) or '0'
    local back = minus(amount)
    if write[5] == '-' then amount, back = back, amount end
    local refusal = add(write, amount, back, write[6], write[7])
    if refusal then return refuse(refusal) end
  end
end

local told = ARGV[2] and string.find(ARGV[2], 'm', 1, true) and {}
local paired = false
for i = 1, #writes do
  local write = writes[i]
  local op = write[1]
  if op < 3 then held[write[2]] = nil end
  if paired then
    paired = false -- this one went with the last
  elseif op == 0 then
    local after = writes[i + 1]
    paired = after and after[1] == 0 and after[2] == write[2]
    if paired then
      call('HSET', write[2], write[3], write[4], after[3], after[4])
    else
      call('HSET', write[2], write[3], write[4])
    end
  elseif op == 1 then
    call('HDEL', write[2], write[3])
  elseif op == 2 then
    call('UNLINK', write[2])
    if write[2] == fence then fence = nil end -- nothing is left to remember
  elseif op == 4 then
    local known = held[write[2]]
    local before = known and known[1] == write[3] and known[2] or call('HGET', write[2], write[3])
    held[write[2]] = nil
    call('HSET', write[2], write[3], (before or '') .. write[4])
  elseif op == 5 then
    call('HSET', write[2], write[3], merged[i])
    if told then told[#told + 1] = merged[i] end
  end
end
if fence and #writes > 0 then call('HSET', fence, worker, sequence, 'n', latest) end
-- A row that a client changes is no longer tracked for it, unless the script reads it once more.
-- Up to Redis 7.0 any read tracks all declared keys, from 7.2 on only what it names (redis #11770).
if KEYS[1] then
  if (redis.REDIS_VERSION_NUM or 0) >= 0x070200 then
    call('EXISTS', unpack(KEYS))
  else
    call('EXISTS', KEYS[1])
  end
end
return told or 0
